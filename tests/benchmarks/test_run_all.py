"""``benchmarks.run_all`` runs every benchmark that there is."""

import re
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from benchmarks import run_all


@pytest.fixture
def main(monkeypatch, capsys):
    """Run it with these arguments; what it printed, and the commands that it would have run."""

    def main(*arguments, cuda=False, failing=()):
        commands = []

        class Process:
            def __init__(self, command, **_options):
                commands.append(command)
                name = command[2].removeprefix("benchmarks.")
                self.stdout, self.returncode = [f"figures of {name}\n"], int(name in failing)

            def __enter__(self):
                return self

            def __exit__(self, *_error):
                return None

        monkeypatch.setattr(run_all, "subprocess", SimpleNamespace(Popen=Process, PIPE=None))
        monkeypatch.setattr(run_all.torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(sys, "argv", ["run_all", *map(str, arguments)])
        try:
            run_all.main()
        finally:
            said = capsys.readouterr().out
        return said, [[command[2], *command[3:]] for command in commands]

    return main


def test_what_is_known_is_of_modules_that_can_be_run():
    assert set(run_all.discover()) >= set(run_all.TRAITS)
    assert len(run_all.discover()) >= 21


def test_all_of_them_are_run_and_those_of_gpus_are_named(main, tmp_path):
    said, commands = main("--page", tmp_path / "page.md")
    ran = {module.removeprefix("benchmarks.") for module, *_ in commands}
    on_gpus = {name for name, traits in run_all.TRAITS.items() if traits.needs_cuda}
    assert ran == set(run_all.discover()) - on_gpus
    page = (tmp_path / "page.md").read_text()
    for name in on_gpus:
        assert f"{name} needs a CUDA device: not run" in said
        assert f"{name} needs a CUDA device: not run" in page
    assert "figures of linear" in page
    _, commands = main(cuda=True)
    assert {module for module, *_ in commands} == {f"benchmarks.{n}" for n in run_all.discover()}


def test_a_failed_one_is_named_and_the_others_go_on(main):
    with pytest.raises(SystemExit, match=r"failed: linear --seconds 0\.01"):
        main("--quick", "--only", "linear", "ssd", failing=("linear",))


def test_those_of_families_are_run_for_each(main):
    options = ("--only", "decode", "serve", "--models", "bamba", "minimax", "--dtypes", "bfloat16")
    _, commands = main(*options, "--quick")
    shown = [" ".join(command).partition(" --markdown")[0] for command in commands]
    assert shown == [
        "benchmarks.decode --model bamba --dtype bfloat16 --quick",
        "benchmarks.decode --model minimax --dtype bfloat16 --quick",
        "benchmarks.serve --model bamba --quick",
    ]


def test_the_list_says_what_each_is_for(main):
    said, commands = main("--list")
    assert commands == []
    lines = said.splitlines()
    assert [line.split()[0] for line in lines] == run_all.discover()
    assert all(len(line.split()) > 4 for line in lines)
    assert sum("(needs a CUDA device)" in line for line in lines) == 5


@pytest.mark.parametrize("name", run_all.discover())
def test_arguments_are_those_that_the_benchmark_takes(name):
    """Its parser may be made by another module of the folder, that it imports or that one does."""
    sources: dict[str, str] = {}
    found = [name]
    while found:
        module = found.pop()
        if module not in sources:
            sources[module] = run_all.source(module).read_text()
            found += re.findall(r"^from benchmarks\.(\w+) import", sources[module], re.MULTILINE)
    traits = run_all.traits_of(name)
    given = [word for word in traits.quick if word.startswith("--")]
    given += ["--model", "--markdown"] if traits.has_options else []
    for flag in given:
        assert any(f'add_argument("{flag}"' in text for text in sources.values()), flag
