"""The harness' model ``torch-hybrid`` beside its own ``hf``, on tasks made of local files."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.tiny_models import FEWEST_LAYERS, qwen3_next_dense
from tests.tiny_tokenizers import CHAT_TEMPLATE, WORDS, byte_level

lm_eval = pytest.importorskip("lm_eval")

OURS = {"max_seqs": 4, "max_tokens": 64, "kv_tokens": 2048, "compile": False}
MAX_LENGTH = 96  # rolling windows of the longer documents, and contexts that are cut
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "until": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["o", "\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    tokenizer = byte_level(CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), **FEWEST_LAYERS["qwen3_next_dense"]}
    qwen3_next_dense(eos_token_id=tokenizer.eos_token_id, **sizes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Folder of the tasks; the documents differ in length."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [
        {
            "question": " ".join(WORDS * (1 + n % 4)) + f" {n}",
            "choices": [" fox", " the quick", f" {n}ü"],
            "answer": n % 3,
            "text": " ".join(WORDS) * (1 + n),
        }
        for n in range(6)
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        whole = {"task": f"local_{name}", "test_split": "test", **source, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))
    return folder


def evaluated(model, arguments, tasks, **options):
    """Results of all tasks, and what the model answered to each request."""
    from lm_eval.tasks import TaskManager

    import torch_hybrid.lm_eval  # noqa: F401  (registers the model)

    found = lm_eval.simple_evaluate(
        model,
        model_args=arguments,
        tasks=[f"local_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    answers = {
        name: [sample["resps"] for sample in sorted(samples, key=lambda each: each["doc_id"])]
        for name, samples in found["samples"].items()
    }
    return found["results"], answers


@pytest.mark.parametrize("chat", [False, True])
def test_answers_are_those_of_the_harness_own_model(checkpoint, tasks, chat):
    """Texts and greedy marks are equal, log-likelihoods up to rounding."""
    shared = {"pretrained": str(checkpoint), "max_length": MAX_LENGTH, "dtype": "float32"}
    options = {"apply_chat_template": chat, "device": "cpu"}
    expected, theirs = evaluated("hf", shared, tasks, batch_size=2, **options)
    results, ours = evaluated("torch-hybrid", {**shared, **OURS}, tasks, **options)
    assert ours["local_until"] == theirs["local_until"]
    assert any(text for ((text,),) in ours["local_until"])
    for own, other in zip(ours["local_choice"], theirs["local_choice"], strict=True):
        for ((score, is_greedy),), ((expected_score, is_expected),) in zip(own, other, strict=True):
            assert score == pytest.approx(expected_score, rel=1e-5)
            assert is_greedy == is_expected
    for own, other in zip(ours["local_rolling"], theirs["local_rolling"], strict=True):
        assert own[0] == pytest.approx(other[0], rel=1e-5)
    for task, metrics in expected.items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert numbers
        found = {name: results[task][name] for name in numbers}
        assert found == pytest.approx(numbers, rel=1e-5), task


def test_wrong_arguments_are_told(checkpoint):
    from torch_hybrid.lm_eval import HybridLM

    with pytest.raises(ValueError, match="max_length must be at most 2047, which kv_tokens raises"):
        HybridLM(str(checkpoint), max_length=2048, **OURS)
    model = HybridLM(str(checkpoint), max_length=MAX_LENGTH, **OURS)
    for kwargs, told in (
        ({"beams": 4}, r"generation_kwargs may have .* got \['beams'\]"),
        ({"max_gen_toks": 96}, "max_gen_toks must be below 96 tokens, got 96"),
    ):
        request = SimpleNamespace(args=("the", kwargs))
        with pytest.raises(ValueError, match=told):
            model.generate_until([request])


def test_the_harness_command_line_finds_the_model(checkpoint, tasks):
    """``python -m torch_hybrid.lm_eval`` is its command line with the model registered."""
    arguments = ",".join(f"{name}={value}" for name, value in OURS.items())
    command = [sys.executable, "-m", "torch_hybrid.lm_eval", "run", "--model", "torch-hybrid",
               "--model_args", f"pretrained={checkpoint},{arguments}", "--tasks", "local_until",
               "--include_path", str(tasks), "--device", "cpu"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "|local_until|" in done.stdout.replace(" ", "")
