"""The command line: what it prints, and one clear message for what a user got wrong."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.parallel.processes import FORKSERVER
from tests.tiny_models import FEWEST_LAYERS
from tests.tiny_tokenizers import image_processor
from tests.tiny_vision import PATCH, make_vision_model
from torch_hybrid.cli import commands as cli
from torch_hybrid.cli import options as cli_options
from torch_hybrid.cli import output as cli_output
from torch_hybrid.cli.options import load_tokenizer
from torch_hybrid.cli.output import print_fact
from torch_hybrid.cli.prompts import read_prompts
from torch_hybrid.graphs.compiling import toolchain
from torch_hybrid.ops import native
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.request import Output

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


def test_generate_with_an_adapter(run, checkpoint, expected, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    # So strong that tokens change, whatever the order in which peft draws factors.
    config = peft.LoraConfig(
        init_lora_weights=False, r=20, lora_alpha=800, target_modules=["q_proj", "o_proj"]
    )
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    options = (*EAGER, "--ids", "5 17 3", "--max-new-tokens", 6, "--ignore-eos")
    lora = f"tuned={tmp_path}"
    code, out, err = run("generate", checkpoint, *options, "--lora", lora)
    assert code == 0, err
    assert [int(word) for word in out.split()] != expected([5, 17, 3], 6)
    code, again, _ = run("generate", checkpoint, *options, "--lora", lora, "--adapter", "tuned")
    assert (code, again) == (0, out)
    code, _, err = run("generate", checkpoint, *options, "--lora", lora, "--adapter", "other")
    assert code == 2
    assert "no adapter 'other' is loaded; loaded are ['tuned']" in err
    code, _, err = run("generate", checkpoint, *options, "--lora", str(tmp_path))
    assert code == 2
    assert "is not NAME=PATH" in err
    code, _, err = run("serve", checkpoint, "--lora", f"tuned={checkpoint}")
    assert code == 2
    assert f"{checkpoint} has no adapter_config.json" in err


def test_generate_answers_while_steps_are_compiled(run, checkpoint, expected):
    options = ("--compile", "background", *EAGER[1:])
    code, out, err = run("generate", checkpoint, *options, "--ids", "5 17 3", "--ignore-eos",
                         "--max-new-tokens", 6)  # fmt: skip
    assert code == 0
    assert [int(word) for word in out.split()] == expected([5, 17, 3], 6)
    assert "compiling" not in err


def test_generate_answers_at_once_and_leaves_an_artefact(run, checkpoint, monkeypatch, tmp_path):
    """By default steps are compiled beside the first ones; who is to write them waits."""
    made = []
    monkeypatch.setattr(cli.ModelOptions, "runner", keeping(cli.ModelOptions.runner, made))
    options = (*EAGER[1:], "--ids", "5 17 3", "--ignore-eos", "--max-new-tokens", 2)
    code, out, _ = run("generate", checkpoint, *options)
    made[0].close()
    assert (code, len(out.split())) == (0, 2)
    path = tmp_path / "steps"
    for is_loaded in (False, True):
        code, out, err = run("generate", checkpoint, *options, "--artefact", path)
        assert (code, len(out.split())) == (0, 2), err
        assert {g.is_loaded for g in made[-1].report().graphs.values()} == {True}, err
        assert path.exists()
        assert (made[-1]._beside._child is None) == is_loaded
    assert [runner.compile for runner in made] == ["background"] * 3


def keeping(make, made):
    """``make``, which also notes in ``made`` what it has made."""

    def make_and_keep(*args, **options):
        made.append(make(*args, **options))
        return made[-1]

    return make_and_keep


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", "bfloat16"), ("HALF", "float16"), ("torch.float32", "float32"), ("fp32", "float32")],
)
def test_dtypes_by_the_names_that_people_have(run, checkpoint, name, dtype):
    code, out, err = run("explain", checkpoint, *EAGER, "--dtype", name)
    assert code == 0, err
    assert f"in {dtype}" in out


@pytest.mark.parametrize("command", ["generate", "explain", "chat", "demo"])
def test_torchrun_without_ranks_is_told(run, checkpoint, monkeypatch, command):
    """Each process would load and serve all of the model."""
    arguments = {"generate": (checkpoint, "hi"), "demo": ()}.get(command, (checkpoint,))
    for name, value in (("LOCAL_RANK", "1"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    code, out, err = run(command, *arguments)
    assert (code, out) == (2, "")
    assert "torchrun started 2 processes, and each would serve all of the model by itself" in err
    assert "--ranks" in err


def test_generate_keeps_8_bits_where_there_is_room(run, checkpoint):
    """For one number and for as many tokens as fit."""
    for tokens in ("256", "auto"):
        options = ("--kv-dtype", "fp8", "--kv-tokens", tokens, "--max-seqs", 2)
        code, out, _ = run("generate", checkpoint, *EAGER, *options, "--ids", "5 17 3",
                           "--max-new-tokens", 6, "--ignore-eos")  # fmt: skip
        assert code == 0
        assert len(out.split()) == 6
    code, out, _ = run("explain", checkpoint, "--eager", *options)
    assert code == 0
    for shown in ("kv_dtype torch.float8_e4m3fn", "kv_tokens auto", "weights, float32", "free"):
        assert shown in " ".join(out.split())
    code, _, err = run("generate", checkpoint, *EAGER, "--kv-tokens", "many", "--ids", "5")
    assert code == 2
    assert "'many' is neither a number nor auto" in err


def run_as_program(arguments, folder):
    """What ``torch-hybrid`` does with these arguments; each rank's stdout is a file."""
    file = os.open(folder / os.environ["RANK"], os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.argv = ["torch-hybrid", *arguments]
    cli.main()
    sys.stdout.flush()


def test_processes_of_torchrun_share_a_model(checkpoint, expected, tmp_path):
    """Its agent starts them here, in processes with the imports done."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    arguments = ("generate", checkpoint, *EAGER, "--ranks", "--device", "cpu", "--ids", "5 17 3",
                 "--max-new-tokens", 6, "--ignore-eos")  # fmt: skip
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="cli",
        start_method=FORKSERVER.get_start_method(),
        monitor_interval=0.1,
    )
    with ThreadPoolExecutor(1) as agent:  # in the main thread it would keep this process's signals
        launched = elastic_launch(config, run_as_program)
        agent.submit(launched, list(map(str, arguments)), tmp_path).result()
    assert [int(word) for word in (tmp_path / "0").read_text().split()] == expected([5, 17, 3], 6)
    assert (tmp_path / "1").read_text() == ""


def test_ranks_are_those_of_torchrun(run, checkpoint):
    code, _, err = run("generate", checkpoint, *EAGER, "--ranks", "--ids", "5")
    assert code == 2
    assert "--ranks shares the model among the processes of torchrun" in err
    code, _, err = run("chat", checkpoint, *EAGER, "--ranks")
    assert code == 2
    assert "use generate" in err


def test_generate_keeps_prefixes_where_it_is_asked_to(run, checkpoint):
    prompt = list(range(3, 103))
    text = " ".join(map(str, prompt))
    sizes = ("--eager", "--max-seqs", 1, "--max-tokens", 128, "--kv-tokens", 256)
    code, out, _ = run("generate", checkpoint, *sizes, "--prefix-cache", 2, "--ids", text, text,
                       "--max-new-tokens", 3, "--ignore-eos", "--json")  # fmt: skip
    assert code == 0
    outputs = [json.loads(line) for line in out.splitlines()]
    assert outputs[0]["tokens"] == outputs[1]["tokens"]
    assert [output["num_cached_tokens"] for output in outputs] == [0, 99]
    code, _, err = run("generate", checkpoint, *EAGER, "--prefix-cache", -1, "--ids", "5")
    assert code == 2
    assert "--prefix-cache" in err


def test_generate_streams_text(run, checkpoint, expected):
    tokenizer = load_tokenizer(str(checkpoint))
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


def test_what_a_checkpoint_asks_for_and_a_command_cannot_do_is_noted(capsys):
    asked = SimpleNamespace(generation_config={"stop_strings": ["END"], "num_return_sequences": 3})
    given = dict.fromkeys(field.name for field in dataclasses.fields(cli_options.SamplingOptions))
    options = cli_options.SamplingOptions(**given | {"stop": (), "ignore_eos": False})
    assert options.of(asked) == th.Sampling(stop=["END"])
    assert (
        "generation_config asks for 3 outputs of a prompt: one is made" in capsys.readouterr().err
    )
    assert options.of(asked, has_texts=False) == th.Sampling()
    assert "stop_strings are not looked for: ['END']" in capsys.readouterr().err
    own = dataclasses.replace(options, stop=("mine",))
    assert own.of(asked) == th.Sampling(stop=["mine"])


LINE = "one\u2028two\u2029three\x85four\x0cfive\x0bsix\x1cseven"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_line_of_a_file_is_one_prompt(tmp_path, end, encoding):
    path = tmp_path / "prompts"
    text = end.join(["the fox", LINE, "", " über ", "last"])
    path.write_bytes(text.encode(encoding))
    prompts = read_prompts([LINE], path, ids=False, chat=False, system=None)
    assert prompts == [LINE, "the fox", LINE, " über ", "last"]
    path.write_bytes(f"5 17{end}3{end}".encode(encoding))
    assert read_prompts([], path, ids=True, chat=False, system=None) == [[5, 17], [3]]


def test_texts_are_printed_as_they_are(capsys):
    text = f"{LINE} :smile: [bold]x[/] \x0c"
    output = Output(index=0, prompt=[1], tokens=[2], text=text, finish_reason="stop")
    cli_output._print_output(0, output)
    assert capsys.readouterr().out.endswith(f"{text}\n")
    line = cli_output._json_line(dataclasses.asdict(output))
    assert len(line.splitlines()) == 1
    assert json.loads(line)["text"] == text


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
        "layers LF",
        "gated_delta_rule",
        "paged_attention",
        "chunk_cpp: chunk_torch was",
        "Pools of",
        f"timeline written to {trace}",
    ):
        assert expected in out
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"decode: 4 sequences", "mixed: 4 decodes and a prompt"} <= names
    assert any("torch_hybrid::gated_delta_rule" in str(name) for name in names)


def test_explain_of_passes_and_schedule(run, checkpoint):
    """The compiled half of ``explain``, on graphs that are not compiled to the end."""
    options = ("--overlap", "on", "--passes", "--diff", "merge_linears", "--linear", "torch")
    with run_as_traced():
        code, out, err = run("explain", checkpoint, *options, "--without", "own_top_k")
    assert code == 0, err
    assert "Graph passes" in out
    assert "interleave_halves" in out
    assert "own_top_k" not in out
    assert "Schedule of decode, in halves" in out
    assert "merge_linears in extend, in halves" in out
    lines = out.splitlines()
    assert any(line.startswith("+a linear") for line in lines)
    assert any(line.startswith("-b linear") for line in lines)
    after = lines[lines.index(next(line for line in lines if "Schedule of decode" in line)) :]
    stages = [word for line in after for word in line.split()[:1] if word[1:].isdecimal()]
    assert stages[:6] == ["a0", "a1", "b0", "a2", "b1", "a3"]


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
        (
            ["CHECKPOINT", "hi", "--seed", "-1"],
            "Invalid value for '--seed': -1 is not in the range",
        ),
        (["CHECKPOINT", "hi", "--seed", str(2**64)], f"Invalid value for '--seed': {2**64} is not"),
        (["CHECKPOINT", "hi", "--kv-tokens", "99999999999"], "the pools need 5"),
        (["CHECKPOINT", "hi", "--max-seqs", "0"], "max_seqs must allow at least one sequence slot"),
        (["CHECKPOINT", "hi", "--device", "gpu"], "device must be 'cpu', 'cuda'"),
        (["CHECKPOINT", "hi", "--chat"], "the tokenizer has no chat template"),
        (["CHECKPOINT", "1", "--chat", "--ids"], "--ids and --chat say different things"),
        (["CHECKPOINT", "hi", "--system", "be brief"], "--system is for --chat"),
        (["CHECKPOINT", "hi", "--artefact", "steps"], "an artefact has compiled steps, got comp"),
        (["CHECKPOINT", "hi", "--compile", "on"], "--eager is --compile off, got --compile on too"),
        (["CHECKPOINT", "a\udc80b"], "a text must be valid Unicode"),
    ],
)
def test_what_a_user_got_wrong_is_a_message_and_code_2(run, checkpoint, arguments, message):
    chosen = [str(checkpoint) if word == "CHECKPOINT" else word for word in arguments]
    code, out, err = run("generate", *chosen, "--eager")
    assert code == 2
    assert message in err.replace("\n", " ")
    assert out == ""
    assert "Traceback" not in err


def test_chat_options(run, chat_checkpoint):
    """A message goes through the chat template, and the checkpoint's sampling is taken."""
    tokenizer = load_tokenizer(str(chat_checkpoint))
    options = ("--chat", "--system", "be brief", "--json", "--seed", 3, "--max-new-tokens", 4)
    code, out, err = run("generate", chat_checkpoint, *EAGER, "the fox", *options)
    assert code == 0, err
    output = json.loads(out)
    prompt = "<|system|>be brief<end><|user|>the fox<end><|assistant|>"
    assert output["prompt"] == tokenizer.encode(prompt)
    model = th.from_pretrained(chat_checkpoint)
    runner = th.Runner(model, max_seqs=1, max_tokens=64, kv_tokens=256, compile=False)
    sampling = th.Sampling.of(model, seed=3, max_new_tokens=4)
    assert (sampling.temperature, sampling.top_k) == (0.7, 5)
    (expected,) = Engine(runner, tokenizer).generate(output["prompt"], sampling)
    assert output["tokens"] == expected.tokens


def test_options_win_over_the_checkpoints_sampling(run, chat_checkpoint):
    chosen = ("--chat", "--json", "--max-new-tokens", 6, "--ignore-eos", "hi")
    greedy = [run("generate", chat_checkpoint, *EAGER, *chosen, "--temperature", 0)]
    greedy += [run("generate", chat_checkpoint, *EAGER, *chosen, "--top-k", 1, "--seed", 5)]
    tokens = [json.loads(out)["tokens"] for _, out, _ in greedy]
    assert tokens[0] == tokens[1]


def test_a_special_token_ends_an_answer(run, chat_checkpoint, monkeypatch):
    """``--stop`` with a special token's text, which is not in what is printed."""
    special = load_tokenizer(str(chat_checkpoint)).convert_tokens_to_ids("<|user|>")
    draws = iter([40, 41, special, 42])
    monkeypatch.setattr("torch_hybrid.serving.in_flight.sample", lambda *args: [next(draws)])
    options = ("--chat", "hi", "--stop", "<|user|>", "--json")
    code, out, err = run("generate", chat_checkpoint, *EAGER, *options)
    assert code == 0, err
    output = json.loads(out)
    assert output["finish_reason"] == "stop"
    assert output["tokens"] == [40, 41, special]


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


@pytest.mark.parametrize(
    ("target", "message"),
    [("gone/trace.json", "No such file or directory"), ("", "Is a directory")],
)
def test_a_trace_that_cannot_be_written_is_said_before_anything_runs(
    run, checkpoint, tmp_path, target, message
):
    code, out, err = run("explain", checkpoint, "--eager", "--trace", tmp_path / target)
    assert code == 2
    assert f"cannot write {tmp_path / target}: {message}" in err.replace("\n", " ")
    assert out == ""


def test_an_old_trace_is_kept_when_the_model_cannot_be_loaded(run, tmp_path):
    (tmp_path / "trace").write_text("old")
    assert run("explain", "./gone", "--trace", tmp_path / "trace")[0] == 2
    assert (tmp_path / "trace").read_text() == "old"
    assert run("explain", "./gone", "--trace", tmp_path / "new")[0] == 2
    assert not (tmp_path / "new").exists()


def test_without_a_compiler_steps_run_uncompiled_and_one_line_says_so(
    run, checkpoint, monkeypatch, expected
):
    said = "no C++ compiler (g++ does not run): install g++"
    monkeypatch.setattr(toolchain, "missing_tools", lambda device: said)
    sizes = EAGER[1:]
    options = ("--ids", "5 17 3", "--max-new-tokens", 3, "--ignore-eos")
    code, out, err = run("generate", checkpoint, *sizes, *options)
    assert code == 0
    assert [int(word) for word in out.split()] == expected([5, 17, 3], 3)
    assert err.splitlines()[0] == f"steps run uncompiled: {said}"
    assert len(err.splitlines()) == 2


def test_a_cache_that_cannot_be_written_is_one_line(run, checkpoint, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, out, err = run("generate", checkpoint, "hi")
    assert (code, out) == (2, "")
    assert "error: torch's compile cache cannot be written" in err
    assert len(err.splitlines()) == 1


def test_kernels_that_cannot_be_built_are_named(monkeypatch, capsys):
    monkeypatch.setattr(native, "compiler_missing", lambda: "cannot write /x: full")
    assert cli_options.can_compile(torch.device("cpu"))
    assert capsys.readouterr().err == "the C++ kernels are not used: cannot write /x: full\n"


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
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "torch_hybrid" / "cli" / "commands.py"))
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


class Reader(io.BytesIO):
    """The other end of stdout; a reader that has left breaks the pipe."""

    def __init__(self, *, has_left=False):
        super().__init__()
        self.has_left = has_left

    def write(self, data):
        if self.has_left:
            raise BrokenPipeError
        return super().write(data)


@pytest.fixture
def piped(run, monkeypatch):
    """Run with a stdout of this encoding; the exit code, and what was read."""

    def piped(encoding, *args, **options):
        reader = Reader(**options)
        stdout = io.TextIOWrapper(reader, encoding=encoding, write_through=True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            code, _, _ = run(*args)
        return code, reader.getvalue()

    return piped


def test_a_terminal_of_ascii_alone_shows_everything(piped, chat_checkpoint, monkeypatch):
    """What the encoding does not have is an escape; JSON stays JSON."""
    tokens = load_tokenizer(str(chat_checkpoint)).encode("日本")
    options = ("generate", chat_checkpoint, *EAGER, "hi", "--max-new-tokens", len(tokens))
    for flags, shown in (((), b"\\u65e5\\u672c\n"), (("--json",), b'"text": "\\u65e5\\u672c"')):
        draws = iter(tokens)
        monkeypatch.setattr(
            "torch_hybrid.serving.in_flight.sample", lambda *args, d=draws: [next(d)]
        )
        code, read = piped("ascii", *options, *flags)
        assert code == 0
        assert shown in read
    code, read = piped("ascii", "explain", chat_checkpoint, *EAGER)
    assert code == 0
    assert b"Pools of" in read
    read.decode("ascii")


def test_marks_and_spinners_are_of_the_encoding(piped, monkeypatch, capsys):
    for encoding, mark in (("utf-8", "✓"), ("ascii", "+"), ("latin-1", "+")):
        reader = Reader()
        stdout = io.TextIOWrapper(reader, encoding=encoding, write_through=True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            print_fact("recall", "100 %", good=True)
        assert reader.getvalue().decode(encoding).startswith(mark)


def test_a_reader_that_leaves_is_no_error(piped, chat_checkpoint, monkeypatch):
    monkeypatch.setattr(cli.os, "dup2", lambda *descriptors: None)
    monkeypatch.setattr(Reader, "fileno", lambda self: 1)
    options = ("a", "b", "--max-new-tokens", 2, "--json")
    code, read = piped("utf-8", "generate", chat_checkpoint, *EAGER, *options, has_left=True)
    assert (code, read) == (141, b"")


@pytest.fixture(scope="module")
def vision_checkpoint(tmp_path_factory):
    """A random Qwen3.5 with its tower, and the processor that an installation would make for it."""
    processor = image_processor(PATCH)
    ids = processor.tokenizer.convert_tokens_to_ids
    options = {"vocab_size": len(processor.tokenizer), **FEWEST_LAYERS["qwen3_5"]}
    model = make_vision_model("qwen3_5", **options)
    model.config.image_token_id = ids("<|image_pad|>")
    model.config.video_token_id = ids("<|video_pad|>")
    folder = tmp_path_factory.mktemp("vision")
    model.save_pretrained(folder)
    return folder, processor


def test_generate_about_an_image(run, vision_checkpoint, monkeypatch, tmp_path):
    from PIL import Image

    folder, processor = vision_checkpoint
    image = tmp_path / "image.png"
    Image.new("RGB", (24, 16), (200, 30, 90)).save(image)
    monkeypatch.setattr(cli, "load_processor", lambda _: processor)
    options = (*EAGER, "--ignore-eos", "--max-new-tokens", 6, "--json")
    code, out, _ = run("generate", folder, *options, "--image", image, "the quick fox")
    assert code == 0
    talk = [{"type": "image", "image": str(image)}, {"type": "text", "text": "the quick fox"}]
    runner = th.Runner(
        th.from_pretrained(folder, vision=True),
        max_seqs=1,
        max_tokens=64,
        kv_tokens=256,
        compile=False,
    )
    (output,) = Engine(runner, processor=processor).generate(
        [{"role": "user", "content": talk}], th.Sampling(max_new_tokens=6, ignore_eos=True)
    )
    assert json.loads(out)["tokens"] == output.tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--image", "not_there.png", "what?"), "'not_there.png' does not exist"),
        (("--image", __file__, "--ids", "5"), "--image is for prompts of text, and --ids has"),
        (("--image", __file__, "what?"), "has no processor of images that transformers can make"),
    ],
)
def test_images_that_cannot_be(run, checkpoint, arguments, message):
    code, _, err = run("generate", checkpoint, *EAGER, *arguments)
    assert code == 2
    assert message in " ".join(err.split())


def test_bits_of_a_server_and_a_trainer(run, checkpoint, monkeypatch):
    from torch_hybrid.cli import check_bits

    options = ("--dtype", "bf16", "--eager", "--tokens", 5)
    code, out, err = run("check-bits", checkpoint, *options)
    assert code == 0, err
    assert out.count("5 tokens: equal; an ordinary trainer is up to") == 4
    scores = check_bits._scores
    monkeypatch.setattr(
        check_bits, "_scores", lambda *given, **without: scores(*given, server=None)
    )
    code, out, _ = run("check-bits", checkpoint, *options)
    assert code == 1
    assert "part at token" in out
    code, _, err = run("check-bits", "/nowhere")
    assert code == 2
    assert "cannot read a model config from /nowhere" in err
