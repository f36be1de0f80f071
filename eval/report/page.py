"""The report as one HTML page, with plots, that asks nothing of the network."""

from __future__ import annotations

from html import escape
from typing import Any

from apex_engine.eval.report.blocks import Block, Judged, Plot, kind_of
from apex_engine.eval.report.plots import svg
from apex_engine.eval.report.sections import sections


def html(report: dict[str, Any]) -> str:
    """One page, without scripts. Without matplotlib it says so where the plots would be."""
    lines = []
    for title, blocks in sections(report).items():
        lines.append('<section class="warning">' if title == "Not measured" else "<section>")
        lines += [f"<h2>{escape(title)}</h2>"] if title else []
        lines += [*map(_html_block, blocks), "</section>"]
    return PAGE.replace("BODY", "\n".join(lines))


def _html_block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Judged):
        return f'<p class="headline {kind_of(block.verdict)}">{escape(block.text)}</p>'
    if isinstance(block, Plot):
        return f"<figure><figcaption>{escape(block.title)}</figcaption>\n{svg(block)}\n</figure>"
    rows = [[f"<th>{escape(word)}</th>" for word in block.header]] if any(block.header) else []
    for row in block.rows:
        kinds = [f' class="{kind_of(cell.verdict)}"' if isinstance(cell, Judged) else "" for cell in row]
        texts = [cell.text if isinstance(cell, Judged) else cell for cell in row]
        rows.append([f"<td{kind}>{escape(text)}</td>" for kind, text in zip(kinds, texts, strict=True)])
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="left{block.left}">\n{body}\n</table></div>'


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Delta report</title>
<style>
:root { color-scheme: light dark; --good: #1a7f37; --open: #9a6700; --bad: #cf222e; --line: #8886; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --open: #d4a72c; --bad: #ff7b72; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.headline { font-size: 1.15rem; border-left: 4px solid; padding-left: .8rem; }
.good { color: var(--good); } .open { color: var(--open); } .bad { color: var(--bad); }
.warning { border: 1px solid var(--open); padding: 0 1rem; } .warning h2 { margin-top: .6rem; color: var(--open); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
.left1 :nth-child(-n+1):is(th, td), .left2 :nth-child(-n+2):is(th, td), .left3 :nth-child(-n+3):is(th, td) { text-align: left; }
figure { margin: 1.2rem 0; } figcaption { font-weight: 600; } svg { max-width: 100%; height: auto; }
</style>
</head>
<body>
<h1>Delta report</h1>
BODY
</body>
</html>
"""
