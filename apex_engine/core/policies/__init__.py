from apex_engine.core.policies.all import POLICIES, Lru, Policy

__all__ = ["POLICIES", "Lru", "Policy"]
