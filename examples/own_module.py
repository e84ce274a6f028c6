"""The layers in a module of your own, under torch.compile.

A hybrid of two layers is compiled as full graphs, and generates text for one, two and five prompts
in a loop of its own: caches and plans are arguments. Batches of all sizes and lengths share three
graphs. A loop that pads its steps to ``buckets`` needs two.
"""

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import torch_hybrid as th
from torch_hybrid.layers import GatedDeltaNet, PagedAttention

DIM, WIDTH, VOCAB_SIZE = 64, 16, 100
LINEAR = th.DeltaRuleSpec(
    num_k_heads=2, num_v_heads=4, head_k_dim=WIDTH, head_v_dim=WIDTH, conv_width=4
)
FULL = th.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=WIDTH, scale=WIDTH**-0.5)
TABLE = th.LayerTable.from_specs([LINEAR, FULL])
PROMPTS = [[5, 7, 1], [3], [9] * 40, [2, 4] * 8, [1, 2, 3, 4, 5]]
BUCKETS = (2, 4, 8, 16, 32, 64, 128)


class LanguageModel(nn.Module):
    """A model of an embedding, one layer of each kind, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB_SIZE, DIM), nn.Linear(DIM, VOCAB_SIZE)
        self.linear, self.full = GatedDeltaNet(DIM, LINEAR), PagedAttention(FULL)
        self.qkv, self.out = nn.Linear(DIM, (4 + 2 + 2) * WIDTH), nn.Linear(4 * WIDTH, DIM)

    def forward(self, tokens: Tensor, step: th.Step) -> Tensor:
        """Compute logits [T, VOCAB_SIZE] of tokens [T], the sequences one after the other."""
        x = self.embed(tokens)
        _, plan, cache = step.layer(0)
        x = x + self.linear(x, plan, cache)
        _, plan, cache = step.layer(1)
        q, k, v = self.qkv(x).unflatten(-1, (-1, WIDTH)).split([4, 2, 2], dim=1)
        return self.head(x + self.out(self.full(q, k, v, plan, cache).flatten(1)))


def generate(
    model: nn.Module, prompts: list[list[int]], buckets: tuple[int, ...] | None = None
) -> list[list[int]]:
    """Generate eight greedy tokens after each prompt."""
    cache = th.HybridCache(TABLE, max_seqs=8, kv_tokens=512, page_size=16)
    backends = th.make_backends(TABLE, cache.sizes)
    seqs, tokens, texts = cache.allocate(len(prompts)), prompts, [[] for _ in prompts]
    for step_id in range(8):
        batch = cache.make_batch(seqs, tokens, buckets=buckets)
        plans = th.plan_all(backends, batch, th.Mode.DECODE if step_id else th.Mode.EXTEND)
        with torch.inference_mode():
            logits = model(batch.tokens, th.Step(plans=plans, caches=cache.pools, table=TABLE))
        cache.commit(seqs, [len(new) for new in tokens])
        last = batch.cu_seqlens[1 : 1 + len(seqs)] - 1
        tokens = logits[last].argmax(-1, keepdim=True).tolist()
        for text, new in zip(texts, tokens, strict=True):
            text += new
    return texts


def main() -> None:
    """Compare with the module that is not compiled, and count the graphs."""
    torch.manual_seed(0)
    model = LanguageModel().eval().requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    before = counters["stats"]["unique_graphs"]
    for buckets, most in ((BUCKETS, 2), (None, 3)):  # the third graph decodes one sequence
        for num_seqs in (1, 2, 5):
            prompts = PROMPTS[:num_seqs]
            assert generate(compiled, prompts, buckets) == generate(model, prompts)
        graphs = counters["stats"]["unique_graphs"] - before
        print(f"1, 2 and 5 sequences, {'padded' if buckets else 'as they come'}: {graphs} graphs")
        assert graphs == most


if __name__ == "__main__":
    main()
