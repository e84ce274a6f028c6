"""``--speculate``: the tokens that come without."""

import pytest

from tests.models.mtp_checkpoint import make_checkpoint

EAGER = ("--eager", "--max-seqs", 2, "--max-tokens", 64, "--kv-tokens", 256, "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Qwen3-Next with a head."""
    path = tmp_path_factory.mktemp("head")
    make_checkpoint("qwen3_next_dense", path)
    return path


def outputs(text):
    """What each prompt got, whichever ended first."""
    lines = text.splitlines()
    return sorted(zip(lines[::2], lines[1::2], strict=True))


def test_generate_drafts(run, folder):
    given = ("generate", folder, *EAGER, "--ids", "5 17 3", "7", "--max-new-tokens", 9)
    code, plain, _ = run(*given)
    assert code == 0
    for drafter in ("ngram", "mtp", folder):
        code, out, _ = run(*given, "--speculate", drafter)
        assert code == 0
        assert outputs(out) == outputs(plain)


def test_what_cannot_draft(run, folder, checkpoint):
    """A checkpoint without a head; a path without a checkpoint; one of another vocabulary."""
    given = (*EAGER, "--ids", "5 17 3")
    for model, drafter, told in (
        (checkpoint, "mtp", "has no MTP head"),
        (folder, folder / "nonesuch", "there is no folder"),
        (folder, checkpoint, "of 199 tokens, got 257"),
    ):
        code, _, err = run("generate", model, *given, "--speculate", drafter)
        assert code == 2
        assert told in " ".join(err.split())
