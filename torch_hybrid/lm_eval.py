"""Model ``torch-hybrid`` of lm-evaluation-harness, over an engine.

The harness looks for no models of other packages, so the import registers this one:
``python -m torch_hybrid.lm_eval --model torch-hybrid --model_args pretrained=PATH --tasks ...``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from torch_hybrid.graphs.runner import Runner
from torch_hybrid.models.load import from_pretrained
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.request import Output

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Encoded = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation
DEFAULT_MAX_LENGTH = 2048  # where neither config nor tokenizer tells, as for the model "hf"
SCORED = Sampling(max_new_tokens=1, prompt_logprobs=1, ignore_eos=True)
DRAWS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens", "seed")


@register_model("torch-hybrid")
class HybridLM(TemplateLM):  # type: ignore[misc]  # without lm_eval it is Any
    """Harness model that runs all requests of a kind by continuous batching.

    Args:
        pretrained: folder of a checkpoint with its tokenizer, or a hub id.
        dtype: format of the weights.
        device: device of the model; "auto" takes CUDA where it is.
        weights: "auto", "int8", "int4", "mxfp4" or "nvfp4": format in which weights are kept.
        max_seqs: most sequences of a step.
        max_tokens: most tokens of a step.
        kv_tokens: tokens that all sequences hold together, as ``Runner`` takes it.
        max_length: most tokens of an input; by default the checkpoint's, as far as they fit.
        max_gen_toks: most new tokens where a task does not tell.
        add_bos_token: whether texts begin with BOS; None leaves it to the tokenizer.
        enable_thinking: variable of the chat template; None leaves it out.
        think_end_token: text that ends reasoning, which is cut off.
        compile: whether steps are compiled.
        batch_size: the harness passes it; the engine makes its own batches.
        max_batch_size: likewise.

    Raises:
        ValueError: ``max_length`` is longer than ``kv_tokens`` can hold.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        weights: str = "auto",
        max_seqs: int = 32,
        max_tokens: int = 2048,
        kv_tokens: int | Literal["auto"] = 32768,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        compile: bool = True,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(pretrained)
        model = from_pretrained(pretrained, dtype=dtype, device=device, weights=weights)
        runner = Runner(
            model, max_seqs=max_seqs, max_tokens=max_tokens, kv_tokens=kv_tokens, compile=compile
        )
        self._engine = Engine(runner, self.tokenizer)
        room = runner.max_seq_len - 1  # a scored sequence holds one token more than its input
        if max_length is not None and max_length > room:
            raise ValueError(
                f"max_length must be at most {room}, which kv_tokens raises, got {max_length}"
            )
        config = AutoConfig.from_pretrained(pretrained)
        longest = resolve_max_length(config, self.tokenizer, default=DEFAULT_MAX_LENGTH)
        self.max_length = max_length or min(longest, room)
        self._max_gen_toks, self._think_end_token = max_gen_toks, think_end_token
        self._specials = {} if add_bos_token is None else {"add_special_tokens": add_bos_token}
        self._template = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness' caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Encode a text; BOS is not repeated before a text that begins with it."""
        specials = self._specials
        if add_special_tokens is not None:
            specials = {"add_special_tokens": add_special_tokens}
        elif has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            specials = {"add_special_tokens": False}
        return list(self.tokenizer.encode(string, **specials))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation by the checkpoint's template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._template,
            )
        )

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Sum the log-probabilities of whole texts, in windows of ``max_length`` tokens."""
        windows: list[Encoded] = []
        ends = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            windows += [(None, *make_disjoint_window(window)) for window in rolling]
            ends.append(len(windows))
        scores = [score for score, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        totals = [sum(scores[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """Score continuations; an input longer than ``max_length`` loses its first tokens."""
        prompts = [
            (context + continuation)[-(self.max_length + 1) :]
            for _, context, continuation in requests
        ]
        outputs = self._outputs(prompts, [SCORED] * len(prompts), disable_tqdm)
        results = []
        for (texts, _context, continuation), output in zip(requests, outputs, strict=True):
            assert output.prompt_logprobs is not None
            scored = output.prompt_logprobs[-len(continuation) :]
            is_greedy = all(each.top[0][0] == each.token for each in scored)
            results.append((sum(each.logprob for each in scored), is_greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts until a stop text, EOS or the most tokens."""
        samplings = [self._sampling(request.args[1]) for request in requests]
        prompts = [
            self.tok_encode(request.args[0])[-(self.max_length - sampling.max_new_tokens) :]
            for request, sampling in zip(requests, samplings, strict=True)
        ]
        texts = []
        outputs = self._outputs(prompts, samplings, disable_tqdm)
        for request, sampling, output in zip(requests, samplings, outputs, strict=True):
            stop = list(sampling.stop)
            texts.append(postprocess_generated_text(output.text, stop, self._think_end_token))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _sampling(self, gen_kwargs: dict[str, Any]) -> Sampling:
        """Translate a task's ``generation_kwargs``.

        Raises:
            ValueError: one of them has no meaning here, or leaves no room for a context.
        """
        given = dict(normalize_gen_kwargs(gen_kwargs, self._max_gen_toks))
        until = handle_stop_sequences(given.pop("until", None), eos=None)
        most = given.pop("max_gen_toks")
        if not given.pop("do_sample", False):
            given["temperature"] = 0.0
        if unknown := given.keys() - DRAWS:
            raise ValueError(f"generation_kwargs may have {DRAWS}, got {sorted(unknown)}")
        if most >= self.max_length:
            raise ValueError(f"max_gen_toks must be below {self.max_length} tokens, got {most}")
        ends = (self.eot_token_id,)
        stop = tuple(text for text in until if text)
        return Sampling(max_new_tokens=most, stop=stop, stop_token_ids=ends, **given)

    def _outputs(
        self, prompts: Sequence[list[int]], samplings: Sequence[Sampling], is_silent: bool
    ) -> Iterable[Output]:
        """Serve prompts together, and return their outputs in order.

        Raises:
            RuntimeError: a request failed.
        """
        if not prompts:
            return []
        served = self._engine.generate(prompts, samplings)
        shown = tqdm(served, total=len(prompts), desc="torch-hybrid", disable=is_silent)
        outputs = sorted(shown, key=lambda output: output.index)
        for output in outputs:
            if output.finish_reason == "error":
                raise RuntimeError(f"request {output.index} failed: {output.error}")
        return outputs


if __name__ == "__main__":
    cli_evaluate()
