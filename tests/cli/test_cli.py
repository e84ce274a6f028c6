"""The command line: what it prints, and one clear message for what a user got wrong."""

import json
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

import torch_hybrid as th
from torch_hybrid import cli
from torch_hybrid.engine import Engine
from torch_hybrid.graphs.compile import GraphRecord, StepBackend
from torch_hybrid.graphs.passes import apply_passes
from torch_hybrid.graphs.schedule import read_schedule

EAGER = ("--eager", "--max-seqs", 4, "--max-tokens", 64, "--kv-tokens", 256)


@pytest.fixture
def expected(checkpoint):
    """Greedy tokens of a prompt, by the engine's Python interface."""

    def generate(prompt, count):
        runner = th.Runner(
            th.from_pretrained(checkpoint), max_seqs=1, max_tokens=64, kv_tokens=256, compile=False
        )
        (output,) = Engine(runner).generate(
            [prompt], th.Sampling(max_new_tokens=count, ignore_eos=True)
        )
        return output.tokens

    return generate


def test_generate_streams_token_ids(run, checkpoint, expected):
    code, out, err = run(
        "generate", checkpoint, *EAGER, "--ids", "5 17 3", "--max-new-tokens", 6, "--ignore-eos"
    )
    assert code == 0
    assert [int(word) for word in out.split()] == expected([5, 17, 3], 6)
    assert "3 + 6 tokens, length; first token after" in err


def test_generate_streams_text(run, checkpoint, expected):
    tokenizer = cli.load_tokenizer(str(checkpoint))
    code, out, _ = run(
        "generate", checkpoint, *EAGER, "the fox", "--max-new-tokens", 9, "--ignore-eos"
    )
    assert code == 0
    tokens = expected(tokenizer.encode("the fox"), 9)
    assert out == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"


def test_generate_serves_a_file_of_prompts(run, checkpoint, expected, tmp_path):
    prompts = tmp_path / "prompts"
    prompts.write_text("1 2 3\n\n4\n")
    options = ("--ids", "--json", "--max-new-tokens", 4, "--ignore-eos")
    code, out, _ = run("generate", checkpoint, *EAGER, "--prompt-file", prompts, *options)
    assert code == 0
    outputs = {line["index"]: line for line in map(json.loads, out.splitlines())}
    assert outputs[0]["tokens"] == expected([1, 2, 3], 4)
    assert outputs[1]["tokens"] == expected([4], 4)
    assert outputs[1]["prompt"] == [4]


def test_generate_prints_each_of_several_outputs(run, checkpoint):
    code, out, err = run("generate", checkpoint, *EAGER, "--max-new-tokens", 3, "[bold]", "two")
    assert code == 0
    assert "6 + 3 tokens" in out
    assert "3 + 3 tokens" in out
    assert "2 requests, 6 new tokens" in err


def test_explain_shows_layers_implementations_and_pools(run, checkpoint, tmp_path):
    trace = tmp_path / "trace.json"
    options = ("--eager", "--linear", "torch", "--trace", trace)
    code, out, _ = run("explain", checkpoint, *options)
    assert code == 0
    for expected in (
        "layers LLLF",
        "gated_delta_rule",
        "paged_attention",
        "cpp: torch was asked for",
        "Pools of",
        f"timeline written to {trace}",
    ):
        assert expected in out
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"decode: 4 sequences", "mixed: 4 decodes and a prompt"} <= names
    assert any("recurrent_gated_delta_rule" in str(name) for name in names)


def test_explain_of_passes_and_schedule(run, checkpoint, monkeypatch):
    """The compiled half of ``explain``, on graphs that are not compiled to the end."""
    monkeypatch.setattr(StepBackend, "__call__", passes_alone)
    options = ("--overlap", "on", "--passes", "--diff", "merge_linears", "--linear", "torch")
    code, out, err = run("explain", checkpoint, *options)
    assert code == 0, err
    assert "Graph passes" in out
    assert "Schedule of decode, in halves" in out
    assert "merge_linears in extend, in halves" in out
    lines = out.splitlines()
    assert any(line.startswith("+a linear") for line in lines)
    assert any(line.startswith("-b linear") for line in lines)
    after = lines[lines.index(next(line for line in lines if "Schedule of decode" in line)) :]
    stages = [word for line in after for word in line.split()[:1] if word[1:].isdecimal()]
    assert stages[:6] == ["a0", "a1", "b0", "a2", "b1", "a3"]

    code, out, _ = run("explain", checkpoint, "--passes", "--without", "merge_linears")
    assert code == 0
    assert "merge_linears" not in out
    assert "interleave_halves" in out


def passes_alone(backend, module, inputs):
    """A StepBackend that leaves Inductor out."""
    records = apply_passes(module, backend._passes, keep_text=backend._keep_text)
    backend._log.graphs.append(
        GraphRecord(
            num_nodes=len(module.graph.nodes),
            ops=Counter(),
            passes=tuple(records),
            schedule=read_schedule(module.graph),
            pool_clones=(),
            seconds=0.0,
        )
    )
    return module.forward


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "hi"], "nowhere"),
        (["./nowhere", "hi"], "there is no folder ./nowhere"),
        (["CHECKPOINT"], "a prompt is needed, or --prompt-file with one in each line"),
        (["CHECKPOINT", "--prompt-file", "gone"], "cannot read prompts from gone"),
        (["CHECKPOINT", "--ids", "1 two"], "a prompt is token ids as in '5 17 3', got '1 two'"),
        (["CHECKPOINT", "--ids", "1 999"], "token ids must be within 0 and 256, got 999"),
        (["CHECKPOINT", "--ids", ""], "the prompt must have at least 1 token, got 0"),
        (["CHECKPOINT", "hi", "--top-p", "2"], "top_p must be within (0, 1], got 2.0"),
        (["CHECKPOINT", "hi", "--full", "best"], "paged_attention has no implementation 'best'"),
        (["CHECKPOINT", "hi", "--dtype", "int3"], "int3"),
        (["CHECKPOINT", "hi", "--max-tokens", "8"], "max_tokens must hold at least one chunk"),
        (["CHECKPOINT", "hi", "--kv-tokens", "32"], "a sequence can hold 32"),
        (["CHECKPOINT", "hi", "--top-k", "many"], "'many' is not a valid integer"),
    ],
)
def test_what_a_user_got_wrong_is_a_message_and_code_2(run, checkpoint, arguments, message):
    chosen = [str(checkpoint) if word == "CHECKPOINT" else word for word in arguments]
    code, out, err = run("generate", *chosen, "--eager")
    assert code == 2
    assert message in err.replace("\n", " ")
    assert out == ""
    assert "Traceback" not in err


def test_a_pass_that_is_none_is_refused(run, checkpoint):
    code, _, err = run("explain", checkpoint, "--without", "reorder")
    assert code == 2
    assert "no pass is named ['reorder']" in err


def test_a_checkpoint_without_a_tokenizer_asks_for_ids(run, checkpoint, tmp_path):
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(checkpoint / name)
    code, _, err = run("generate", tmp_path, "hi", "--eager")
    assert code == 2
    assert "has no tokenizer that transformers can read; give prompts as token ids" in err


def test_bench_hands_its_arguments_on(run, monkeypatch):
    commands = []

    def call(command, *, cwd, check):
        commands.append((command, cwd))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(cli.subprocess, "run", call)
    code, _, _ = run("bench", "--quick", "--only", "decode")
    assert code == 3
    ((command, folder),) = commands
    assert command == [sys.executable, "-m", "benchmarks.run_all", "--quick", "--only", "decode"]
    assert (folder / "benchmarks" / "run_all.py").is_file()


def test_bench_outside_a_checkout_says_where_it_is(run, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "torch_hybrid" / "cli.py"))
    code, _, err = run("bench")
    assert code == 2
    assert "the benchmarks are in the repository and not in the package" in err


def test_ctrl_c_ends_with_130_and_no_traceback(run, checkpoint, monkeypatch):
    def interrupted(engine):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    code, _, err = run("generate", checkpoint, *EAGER, "--ids", "1")
    assert code == 130
    assert err.strip() == "interrupted"


def test_a_missing_package_names_the_extra():
    script = """
        import sys
        sys.modules["rich"] = None
        import torch_hybrid.cli
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'torch-hybrid[hf]'" in done.stderr
    assert "Traceback" not in done.stderr
