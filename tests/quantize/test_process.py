"""What needs a process of its own: one for all of it, since starting it takes seconds."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import quantize
from folders import contents

from models import save_model

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_local_experts": 8}
LAYER = 8 * 3 * 256 * 512 * 2  # bytes of one layer's experts in the source: 6.3 MB

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from transformers import AutoModelForCausalLM

finished, source, small, large, scratch = map(Path, sys.argv[1:])
assert "apex_engine" not in sys.modules
try:
    AutoModelForCausalLM.from_pretrained(finished)
    print(json.dumps(None))
except Exception as error:
    print(json.dumps(type(error).__name__))

from apex_engine.quantize.convert import convert
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source

def peak():  # not getrusage, whose maximum includes the parent's memory at the fork
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) << 10

for model in (small, large):
    convert("x", Source(model), scratch / model.name, Options(), lambda n: None)
    print(peak(), flush=True)

done = []
def progress(n):
    done.append(n)
    if len(done) == 9:  # in the middle of the second layer
        os.kill(os.getpid(), signal.SIGKILL)
convert(source.name, Source(source), scratch / "killed", Options(), progress)
"""


@pytest.fixture(scope="module")
def ran(tiny, tmp_path_factory):
    """The process's exit code, stderr, the lines it printed, and the folder it wrote to."""
    scratch = tmp_path_factory.mktemp("process")
    source, finished = tiny(num_hidden_layers=3)
    models = [save_model(scratch / f"source{layers}", num_hidden_layers=layers, **SHAPE) for layers in (2, 6)]
    command = [sys.executable, "-c", SCRIPT, *map(str, (finished, source, *models, scratch / "written"))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    return SimpleNamespace(stderr=ended.stderr, lines=lines, folder=Path(scratch / "written"))


def test_transformers_alone_refuses_a_checkpoint(ran):
    """Where apex_engine is not imported, the experts would be random numbers, with a warning."""
    assert ran.lines[0] == "RuntimeError"
    assert "experts.down_proj" in ran.stderr and "MISMATCH" in ran.stderr


def test_memory_stays_near_one_expert_whatever_the_models_size(ran):
    """Peak memory of a conversion grows with an expert, not with the number of layers."""
    small, large = ran.lines[1:3]
    assert large - small < 2 * LAYER, (small, large)  # four layers more are 25 MB


def test_sigkill_in_the_middle(ran, tiny):
    source, finished = tiny(num_hidden_layers=3)
    assert list((ran.folder / "killed").rglob("*.part"))
    quantize(source, ran.folder / "killed")
    assert contents(ran.folder / "killed") == contents(finished)
