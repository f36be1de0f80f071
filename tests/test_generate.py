"""The commands as their user meets them."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import apex_engine
from apex_engine import generate
from apex_engine.cli import quantizing
from apex_engine.cli.console import run
from apex_engine.errors import human
from apex_engine.quantize import __main__ as quantize_command
from apex_engine.quantize import blob
from models import save_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def call(main, *args, stdin=None):
        monkeypatch.setattr(sys, "argv", ["command", *map(str, args)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            run(main)
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


@pytest.fixture
def write(command, bundled_apex):
    """The generate command on the bundled model."""
    return lambda *args, stdin=None: command(generate.main, bundled_apex, *args, stdin=stdin)


def expected_text(bundled, prompt, n):
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    model = AutoModelForCausalLM.from_pretrained(bundled)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(ids, max_new_tokens=n, do_sample=False)[0])


class TestGenerate:
    def test_exact_mode_prints_transformers_text(self, bundled, write):
        code, out, err = write("And it came to pass", "-n", 12, "--mode", "exact")
        assert code == 0
        assert out == expected_text(bundled, "And it came to pass", 12) + "\n"
        assert "plan: mode exact" in err and "of 64 experts" in err
        assert "ledger" in err and "tokens/s" in err and "share of gate mass" in err
        assert "alters precision" not in err

    def test_adaptive_mode_says_what_it_does(self, write):
        _, _, err = write("Thus saith", "-n", 4)
        assert "adaptive mode alters precision" in err and "--mode exact forbids it" in err

    def test_prompt_from_a_file_and_from_stdin(self, write, tmp_path):
        (tmp_path / "prompt.txt").write_text("Thus saith the LORD")
        runs = [
            write("--file", tmp_path / "prompt.txt", "-n", 4, "--stats", "none"),
            write("-", "-n", 4, "--stats", "none", stdin="Thus saith the LORD\n"),
            write("-n", 4, "--stats", "none", stdin="Thus saith the LORD"),
            write("Thus saith the LORD", "-n", 4, "--stats", "none"),
        ]
        assert len({out for _, out, _ in runs}) == 1 and runs[0][1].startswith("Thus saith the LORD")

    def test_stats_as_json_are_all_there_is_on_stderr(self, write):
        _, _, err = write("Thus saith", "-n", 4, "--stats", "json", "--memory", "2MB", "--policy", "lru", "--t1", "0.5")
        stats = json.loads(err)
        assert stats["config"]["policy"] == "lru" and stats["plan"]["budget_bytes"] == 2_000_000
        assert stats["tokens"]["decode"] == 3

    def test_a_seed_gives_the_same_sample(self, write):
        args = ("Enter MACBETH", "-n", 12, "--do-sample", "--temperature", "1.5", "--mode", "exact", "--stats", "none")
        first, again, other = (write(*args, "--seed", seed)[1] for seed in (1, 1, 2))
        assert first == again != other

    def test_chat_template(self, tmp_path, bundled_apex):
        tokenizer = AutoTokenizer.from_pretrained(bundled_apex)
        plain = generate._encode(tokenizer, "hello", raw=False)
        tokenizer.chat_template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %} assistant:"
        chat = generate._encode(tokenizer, "hello", raw=False)
        assert tokenizer.decode(chat[0]) == "<s>user: hello assistant:"
        assert torch.equal(generate._encode(tokenizer, "hello", raw=True), plain)

    def test_without_arguments_it_is_the_demo(self, command, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        code, out, err = command(generate.main, "-n", 3)
        assert code == 0 and out.startswith(generate.DEMO_PROMPT)
        assert "quantizing the bundled model" in err
        assert "quantizing" not in command(generate.main, "-n", 3)[2]
        assert command(generate.main, "tiny", "hello", "-n", 3)[1].startswith("hello")

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("hello", "--memory", "1KB"), "give at least 512000"),
            (("hello", "--memory", "much"), "not understood"),
            (("hello", "--t1", "0.9", "--t2", "0.5"), "t1 <= t2"),
            (("hello", "-n", "5000"), "2048 positions"),
            (("hello " * 3000,), "2048 positions"),
            (("hello", "-n", "0"), "at least 1"),
            (("hello", "--temperature", "0.5"), "no effect without --do-sample"),
            (("hello", "--do-sample", "--temperature", "-1"), "temperature"),
            (("hello", "--file", "/nowhere"), "two prompts"),
            (("--file", "/nowhere"), "/nowhere"),
            (("",), "no prompt"),
            (("hello", "--device", "teapot"), "unknown device teapot"),
            (("hello", "--device", "meta"), "unknown device meta"),
            (("hello", "--device", "cuda:99"), "CUDA devices here"),
            (("hello", "--seed", "-1"), "--seed -1 is out of range"),
            (("hello", "--memory", "9" * 400 + "GiB"), "not understood"),
            (("hell\udcff",), "the prompt cannot be read"),
            (("hello", "--memory", "5MiB", "--device-memory", "10MiB"), "two budgets"),
            (("hello", "--mode", "exact", "--t1", "0.3"), "--t1 has no effect in exact mode"),
            (("hello", "--host-memory", "100%"), "a tier behind a GPU or a simulated link"),
        ],
    )
    def test_mistakes_are_one_line_and_exit_2(self, write, args, message):
        code, out, err = write(*args)
        assert (code, out) == (2, "")
        (line,) = err.strip().splitlines()
        assert line.startswith("error: ") and message in line

    def test_not_a_directory(self, command, tmp_path):
        code, _, err = command(generate.main, tmp_path / "nothing", "hello")
        assert code == 2 and "is no directory: the first argument is the folder" in err
        assert "make it with `python -m apex_engine.quantize olmoe`" in command(generate.main, "olmoe", "hello")[2]

    def test_a_prompt_in_the_place_of_the_model(self, command):
        code, _, err = command(generate.main, "And it came to pass", stdin="")
        assert code == 2 and "is no directory, and there is no prompt" in err

    def test_closed_streams(self, write, monkeypatch):
        monkeypatch.setattr(sys, "stdin", None)
        code, _, err = write()
        assert code == 2 and "no prompt" in err
        code, _, err = write("-")
        assert code == 2 and "no prompt" in err

    def test_a_full_disk(self, bundled_apex):
        """In a process of its own: what is left in the buffer is written at its exit."""
        command = [sys.executable, "-m", "apex_engine.generate", bundled_apex, "hello", "-n", "2"]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 2 and done.stderr.endswith("error: No space left on device\n")
        assert "Traceback" not in done.stderr

    def test_what_the_system_refuses_is_one_line(self, command):
        def main():
            raise PermissionError(13, "Permission denied", "/a/shard")

        assert command(main) == (2, "", "error: /a/shard: Permission denied\n")

    def test_the_source_model_instead_of_the_apex_checkpoint(self, command, bundled):
        code, _, err = command(generate.main, bundled, "hello")
        assert code == 2 and "an ordinary model" in err and "then give checkpoints/tiny-mixtral-apex" in err

    def test_all_that_fits_is_said(self, write):
        assert "--mode exact needs no more and alters nothing" in write("hello", "-n", "1", "--memory", "100%")[2]
        assert "alters nothing" not in write("hello", "-n", "1", "--memory", "50%")[2]

    def test_the_plan_counts_dense_weights_in_the_dtype_of_the_computation(self, write):
        assert "dense weights │   6.4 MiB" in write("hello", "-n", "1", "--dtype", "float32")[2]
        assert "dense weights │   3.2 MiB" in write("hello", "-n", "1")[2]

    def test_ctrl_c_ends_with_the_ledger_so_far(self, write, monkeypatch):
        left = [3]
        end = apex_engine.Engine.end_pass

        def interrupted(self, *args):
            end(self, *args)
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        monkeypatch.setattr(apex_engine.Engine, "end_pass", interrupted)
        code, out, err = write("hello", "-n", "50")
        assert code == 130 and out.endswith("\n") and "decode: 2 tokens" in err and err.endswith("stopped\n")

    def test_no_tokenizer(self, command, tiny):
        code, _, err = command(generate.main, tiny()[1], "hello")
        assert code == 2 and "has no tokenizer" in err and len(err.strip().splitlines()) == 1

    def test_unknown_flags_are_argparses(self, write):
        code, _, err = write("hello", "--polcy", "lru")
        assert code == 2 and "unrecognized arguments: --polcy" in err


class TestQuantize:
    def test_table_and_rerun(self, command, bundled, tmp_path):
        code, out, err = command(
            quantize_command.main, bundled, "-o", tmp_path / "apex", "--high", "int8", "--low-down", 3
        )
        assert (code, out) == (0, "")
        for part in (
            "64 experts in 8 layers",
            "int8",
            "int3",
            "relative error",
            "225,280 bytes an expert",
            "8.15 bits a weight",
        ):
            assert part in " ".join(err.split())
        code, _, err = command(
            quantize_command.main, bundled, "-o", tmp_path / "apex", "--high", "int8", "--low-down", 3
        )
        assert code == 0 and "is complete already: nothing to do" in " ".join(err.split())

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("/nowhere/at/all",), "no directory, no hub id"),
            (("tiny", "--group-size", "38"), "use one of 8, 16, 32, 64"),
            (("tiny", "--group-size", "0"), "use one of 8, 16, 32, 64"),
            (("olmoe",), "the hub could not be reached"),
        ],
    )
    def test_mistakes_are_one_line_and_leave_nothing(self, command, tmp_path, monkeypatch, args, message):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        code, out, err = command(quantize_command.main, *args, "-o", tmp_path / "apex")
        assert (code, out) == (2, "") and not (tmp_path / "apex").exists()
        (line,) = err.strip().splitlines()
        assert line.startswith("error: ") and message in line

    def test_nan_in_a_weight(self, command, tmp_path):
        from models import make_model

        model = make_model("mixtral", torch.bfloat16)
        model.model.layers[0].mlp.experts.gate_up_proj.data[0, 0, 0] = float("nan")
        model.save_pretrained(tmp_path / "source")
        code, _, err = command(quantize_command.main, tmp_path / "source", "-o", tmp_path / "apex")
        assert code == 2 and "model.layers.0.mlp.experts, expert 0: the up matrix has a NaN" in err
        assert "Traceback" not in err

    def test_ctrl_c_leaves_a_run_that_goes_on(self, command, tmp_path, monkeypatch):
        source = save_model(tmp_path / "source")
        encode, left = blob.encode, [40]

        def interrupted(*args):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return encode(*args)

        monkeypatch.setattr(blob, "encode", interrupted)
        code, _, err = command(quantize_command.main, source, "-o", tmp_path / "apex")
        assert code == 130 and "run the same command again" in err and "Traceback" not in err
        assert not list((tmp_path / "apex").rglob("*.part"))
        monkeypatch.undo()
        quantizing.quantize(str(source), tmp_path / "apex", quantize_command.Options())


def test_commands_run_as_modules_from_anywhere(tmp_path):
    """Namespace folders, the mapping of the package and `python -m`, from a folder that is not the checkout."""
    for module in ("apex_engine.quantize", "apex_engine.generate"):
        shown = subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert "default" in shown.stdout


def test_from_a_checkout_without_installing():
    """`apex_engine` finds its sister folders beside it."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import apex_engine.kernels.layout as m; print(m.__file__)"
    shown = subprocess.run(
        [sys.executable, "-S", "-c", f"import site; site.main(); {code}", str(ROOT)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(shown.stdout.strip()) == ROOT / "kernels" / "layout.py"


def test_human():
    assert [human(n) for n in (0, 1023, 1536, 6 << 30, 3 << 41)] == ["0 B", "1023 B", "1.5 KiB", "6.0 GiB", "6.0 TiB"]
