"""Training of the demo's checkpoint: the recall model from scratch, then with an MTP head.

    python examples/train_recall.py --out build/recall
    python examples/train_recall.py --out build/recall --model PATH    the second part alone

It runs on one CPU thread. The defaults are those of the checkpoint in the package; its two parts
took 16 and 18 minutes of a shared core with transformers' mixers. Those that ``make_trainable``
puts in front print the same losses, in 0.8 of the CPU time of the first part. Fixed seeds and a
single thread make a second run on the same kind of processor print the same losses.
``torch_hybrid/demo/task.py`` describes the task.

The number of writes grows with the model's accuracy. Over short prompts the model finds the circuit
that matches a query with a key; over long ones it only has to make the match sharper. Trained on
long prompts from the start, it keeps guessing one of the values that it has seen.

The head begins as the model's last layer, which matches queries with keys already. Before it stands
a linear map, fitted to give that layer its usual inputs. Then the head is trained as it drafts. Its
first step reads the model's hidden states, each further step those of the step before it. All steps
read the keys of the first one. The model is trained with the head, since a head has no recurrent
state. The head can tell only from hidden states what a key was bound to last. Hidden states of a
model that was trained alone need not say it: a head for such a model missed up to a tenth of its
drafts.
"""

from __future__ import annotations

import argparse
import copy
import math
import string
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    Qwen3NextRMSNorm,
)

import torch_hybrid as th
from torch_hybrid.demo.task import RECALL, make_bindings, make_prompts

LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention"]
IGNORED = -100  # the label that cross_entropy leaves out
CHAINS = 8  # queries after the writes of a training row, each with its answers
CHAIN_LEN = 8
CHAIN_LENS = (8, 16, 32, 64)  # with a head: longer answers, with as many tokens in all
WARMUP_STEPS = 50
DRAFTS = 3  # depth to which the head is trained; deeper drafts behave alike
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %} {{ message.content }}{% endfor %}"


def make_config() -> Qwen3NextConfig:
    """Make the config of a hybrid small enough for the repository: 150,064 parameters."""
    num_layers = len(LAYER_TYPES)
    return Qwen3NextConfig(
        vocab_size=RECALL.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        layer_types=LAYER_TYPES,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        mlp_only_layers=list(range(num_layers)),
        num_experts=0,
        num_experts_per_tok=0,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
        },
        initializer_range=0.1,
        pad_token_id=RECALL.pad,
        bos_token_id=RECALL.bos,
    )


def make_model() -> Qwen3NextForCausalLM:
    """Make a new model whose states remember from 10 to 1000 tokens.

    With transformers' own initial values, states forget within a few tokens. The convolution then
    starts so near to zero that the delta rule has nothing to store.
    """
    model = Qwen3NextForCausalLM(make_config())
    for module in model.modules():
        if isinstance(module, Qwen3NextGatedDeltaNet):
            decay = torch.logspace(-3, -1, module.num_v_heads)
            with torch.no_grad():
                module.A_log.zero_()
                module.dt_bias.copy_(decay.expm1().log())
            module.conv1d.reset_parameters()
    return th.make_trainable(model)


def make_rows(
    rng: np.random.Generator, num_writes: int, tokens: int, chain_len: int = CHAIN_LEN
) -> tuple[Tensor, Tensor]:
    """Make about ``tokens`` tokens of training rows, and the labels of their recalled symbols."""
    num_chains = CHAINS * CHAIN_LEN // chain_len
    row_len = RECALL.prompt_len(num_writes) - 2 + num_chains * (chain_len + 2)
    batch = max(1, tokens // row_len)
    bindings = make_bindings(rng, batch, num_writes)
    ask = np.full((batch, 1), RECALL.ask)
    rows = [np.full((batch, 1), RECALL.bos), bindings.writes]
    labels = [np.full((batch, 1 + 3 * num_writes), IGNORED)]
    for _ in range(num_chains):
        chain = bindings.chains(rng, chain_len)
        rows += [ask, chain]
        labels += [np.full((batch, 2), IGNORED), chain[:, 1:]]
    return torch.from_numpy(np.hstack(rows)), torch.from_numpy(np.hstack(labels))


def loss_and_accuracy(
    model: Qwen3NextForCausalLM, rows: Tensor, labels: Tensor
) -> tuple[Tensor, float]:
    """Compute the cross entropy of the labelled tokens, and the share predicted right."""
    hidden = model.model(rows[:, :-1], use_cache=False).last_hidden_state
    labelled = labels[:, 1:] != IGNORED
    logits, targets = model.lm_head(hidden[labelled]), labels[:, 1:][labelled]
    accuracy = (logits.argmax(-1) == targets).float().mean().item()
    return F.cross_entropy(logits, targets), accuracy


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Make an AdamW that decays matrices alone: no norms, decay rates or convolutions."""
    parameters = dict(model.named_parameters())
    matrices = [p for name, p in parameters.items() if p.ndim == 2]
    others = [p for name, p in parameters.items() if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def lr_scale(step: int, steps: int) -> float:
    """Compute the scale of the learning rate: linear warm-up, then a cosine to 0."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


def draw_num_writes(rng: np.random.Generator, most: int) -> int:
    """Draw a number of writes, few more often than many.

    With few writes, the writes of one key are near each other, and the last one is hardest to tell.
    """
    span = most + 1 - RECALL.min_writes
    return RECALL.min_writes + int(span * rng.random() ** 2)


class Curriculum:
    """A growing limit of writes in a row: a quarter more each time the model has caught up."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.limit = 4.0
        self.accuracy = 0.0

    def num_writes(self) -> int:
        return draw_num_writes(self.rng, int(self.limit))

    def update(self, accuracy: float) -> None:
        self.accuracy += 0.05 * (accuracy - self.accuracy)
        if self.accuracy > 0.9 and self.limit < RECALL.max_writes:
            self.limit = min(RECALL.max_writes, 1.25 * self.limit)
            self.accuracy -= 0.1


def train(steps: int, tokens: int, lr: float, seed: int) -> Qwen3NextForCausalLM:
    """Train from scratch and print the progress."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = make_model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = make_optimizer(model, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_scale(step, steps))
    curriculum = Curriculum(rng)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        rows, labels = make_rows(rng, curriculum.num_writes(), tokens)
        loss, accuracy = loss_and_accuracy(model, rows, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        curriculum.update(accuracy)
        if step % 100 == 0 or step == steps:
            print(
                f"step {step:5d}  {time.perf_counter() - start:5.0f} s  "
                f"up to {int(curriculum.limit):2d} writes  loss {loss.item():.4f}  "
                f"accuracy {curriculum.accuracy:.4f}",
                flush=True,
            )
    return model.eval()


class Head(nn.Module):
    """An MTP head, its weights under the names that checkpoints have.

    It begins with the last layer and the last norm of a model. Its linear map is fitted by least
    squares to the inputs of that layer for some ``tokens``.
    """

    def __init__(self, model: Qwen3NextForCausalLM, tokens: Tensor) -> None:
        super().__init__()
        config = model.config
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * dim, dim, bias=False)
        self.pre_fc_norm_embedding = Qwen3NextRMSNorm(dim, eps)
        self.pre_fc_norm_hidden = Qwen3NextRMSNorm(dim, eps)
        layer = copy.deepcopy(model.model.layers[LAYER_TYPES.index("full_attention")])
        layer.self_attn.layer_idx = 0  # in a cache of its own
        self.layers = nn.ModuleList([layer])
        self.norm = copy.deepcopy(model.model.norm)
        with torch.no_grad():
            states = model.model(tokens, use_cache=False, output_hidden_states=True)
            embedded, *_, given = states.hidden_states[:-1]
            both = self.both(embedded, states.last_hidden_state)
            mapped = torch.linalg.lstsq(both.flatten(0, 1), given.flatten(0, 1)).solution
            self.fc.weight.copy_(mapped.T)
        self.requires_grad_()

    def both(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Concatenate each token's embedding and the hidden state before it: [B, T, 2 * dim]."""
        before = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        return torch.cat(
            [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)], -1
        )

    def forward(self, embedded: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Predict what follows each token: [B, T, dim]."""
        out = self.layers[0](self.fc(self.both(embedded, hidden)), **options)
        return self.norm(out)


def hidden_states(model: Qwen3NextForCausalLM, head: Head, tokens: Tensor) -> list[Tensor]:
    """Compute hidden states [B, T, dim] of the model, then of each draft step of the head.

    Step d at token t sees keys of the first step, of tokens up to t - d: those committed by then.
    It also sees the keys of the steps that led to it.
    """
    hidden = model.model(tokens, use_cache=False).last_hidden_state
    embedded = model.model.embed_tokens(tokens)
    place = torch.arange(tokens.shape[1])
    rotations = model.model.rotary_emb(embedded, place[None])
    behind = place[:, None] - place
    cache, states = DynamicCache(), [hidden]
    for ahead in range(DRAFTS):
        seen = [behind >= ahead, *(behind == ahead - back for back in range(1, ahead + 1))]
        mask = torch.zeros(1, 1, len(place), len(place) * len(seen))
        mask.masked_fill_(~torch.cat(seen, 1), -math.inf)
        mask[..., :ahead, :] = 0.0  # no draft path leads to these rows: any mask will do
        hidden = head(
            embedded,
            hidden,
            position_embeddings=rotations,
            attention_mask=mask,
            past_key_values=cache,
        )
        states.append(hidden)
    return states


def train_with_head(
    model: Qwen3NextForCausalLM, steps: int, tokens: int, lr: float, head_lr: float, seed: int
) -> Head:
    """Train a model further beside a new head; print the accuracy of both.

    The head's is printed by the depth of its drafts.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model.requires_grad_(False)
    head = Head(model, make_rows(rng, RECALL.max_writes // 2, 8 * tokens)[0])
    model.requires_grad_()
    print(f"{sum(p.numel() for p in head.parameters()):,} parameters of the head")
    optimizers = [make_optimizer(model, lr), make_optimizer(head, head_lr)]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_scale(step, steps))
        for optimizer in optimizers
    ]
    right = np.zeros(1 + DRAFTS)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        num_writes = draw_num_writes(rng, RECALL.max_writes)
        rows, labels = make_rows(rng, num_writes, tokens, int(rng.choice(CHAIN_LENS)))
        labelled, losses = labels[:, 1:] != IGNORED, []
        targets = labels[:, 1:][labelled]
        for place, hidden in enumerate(hidden_states(model, head, rows[:, :-1])):
            logits = model.lm_head(hidden[labelled])
            losses.append(F.cross_entropy(logits, targets))
            share = (logits.argmax(-1) == targets).float().mean().item()
            right[place] += (share - right[place]) * max(0.02, 1 / step)
        of_model, *of_drafts = losses
        (of_model + torch.stack(of_drafts).mean()).backward()
        for module, optimizer, schedule in zip((model, head), optimizers, schedules, strict=True):
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step % 100 == 0 or step == steps:
            print(
                f"step {step:5d}  {time.perf_counter() - start:5.0f} s  "
                f"right {right[0]:.4f}  drafts {np.array2string(right[1:], precision=4)}",
                flush=True,
            )
    return head.requires_grad_(False)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of words: symbols are letters and digits, alone and doubled.

    "let a b let b a get a" is a prompt; an unknown word becomes padding.
    """
    signs = string.ascii_letters + string.digits
    names = {RECALL.pad: "<pad>", RECALL.bos: "<bos>", RECALL.write: "let", RECALL.ask: "get"}
    names |= enumerate([*signs, *(2 * sign for sign in signs)], RECALL.first_symbol)
    words = Tokenizer(WordLevel({name: token for token, name in names.items()}, "<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", RECALL.bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<pad>",
        bos_token="<bos>",
        chat_template=CHAT_TEMPLATE,
    )


def save(model: Qwen3NextForCausalLM, head: Head, path: Path) -> None:
    """Write a checkpoint with the head beside the model, where transformers ignores it."""
    make_tokenizer().save_pretrained(path, save_jinja_files=False)
    model.save_pretrained(path)
    file = path / "model.safetensors"
    weights = load_file(file) | {f"mtp.{name}": w for name, w in head.state_dict().items()}
    save_file(weights, file, {"format": "pt"})


@torch.no_grad()
def exact_answers(model: Qwen3NextForCausalLM, num: int, seed: int) -> float:
    """Measure the share of ``num`` new prompts that greedy generation answers without an error."""
    right = 0
    for prompt in make_prompts(num, seed):
        tokens = torch.tensor([prompt.tokens])
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=len(prompt.answer),
            do_sample=False,
        )
        right += output[0, tokens.shape[1] :].tolist() == prompt.answer
    return right / num


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's recall model from scratch.")
    parser.add_argument("--out", type=Path, default=Path("build/recall"), help="checkpoint folder")
    parser.add_argument("--model", type=Path, help="a checkpoint to train further, with a new head")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--head-steps", type=int, default=3000, help="steps of model and head")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--head-tokens", type=int, default=1024, help="tokens, with the head")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--further-lr", type=float, default=2e-3, help="model's, with the head")
    parser.add_argument("--head-lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", type=int, default=1024, help="prompts of the final check")
    args = parser.parse_args()

    torch.set_num_threads(1)  # a second run must sum in the same order
    if args.model is None:
        model = train(args.steps, args.tokens, args.lr, args.seed)
    else:
        model = th.make_trainable(Qwen3NextForCausalLM.from_pretrained(args.model))
    head = train_with_head(
        model, args.head_steps, args.head_tokens, args.further_lr, args.head_lr, args.seed
    )
    save(model, head, args.out)
    print(f"saved to {args.out}")
    if args.fresh:
        accuracy = exact_answers(model, args.fresh, seed=args.seed + 1)
        print(f"answers without an error: {accuracy:.2%} of {args.fresh} fresh prompts")


if __name__ == "__main__":
    main()
