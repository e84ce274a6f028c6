"""How do I use one linear-attention layer in a module of my own, under torch.compile?

A block with a gated-delta-rule mixer is compiled as one full graph and serves a prompt of two
sequences in one piece, then in two pieces: the state that the first piece leaves is an argument.
"""

import torch
from torch import Tensor, nn

import torch_hybrid as th
from torch_hybrid.layers import GatedDeltaNet

SPEC = th.DeltaRuleSpec(num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16, conv_width=4)
TABLE = th.LayerTable.from_specs([SPEC])
DIM = 64


class Block(nn.Module):
    """A residual block around the mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.mixer = GatedDeltaNet(DIM, SPEC)

    def forward(self, x: Tensor, step: th.Step) -> Tensor:
        """x [T, DIM]: the tokens of all sequences, packed."""
        _, plan, cache = step.layer(0)
        return x + self.mixer(self.norm(x), plan, cache)


def run(block: nn.Module, x: Tensor, pieces: list[list[int]]) -> Tensor:
    """Feed each sequence's rows of ``x`` [num_seqs, length, DIM] in pieces of the given lengths."""
    cache = th.HybridCache(TABLE, max_seqs=4, kv_tokens=256, page_size=16)
    backends = th.make_backends(TABLE, cache.sizes)
    seqs = cache.allocate(len(x))
    done, outputs = [0] * len(x), [[] for _ in x]
    for lengths in pieces:
        ends = [start + length for start, length in zip(done, lengths, strict=True)]
        rows = torch.cat([s[a:b] for s, a, b in zip(x, done, ends, strict=True)])
        batch = cache.make_batch(seqs, [[0] * length for length in lengths])
        plans = th.plan_all(backends, batch, th.Mode.EXTEND)
        out = block(rows, th.Step(plans=plans, caches=cache.pools, table=TABLE))
        cache.commit(seqs, lengths)
        for output, piece in zip(outputs, out.split(lengths), strict=True):
            output.append(piece)
        done = ends
    return torch.stack([torch.cat(output) for output in outputs])


def main() -> None:
    """Compare one piece with two."""
    torch.manual_seed(0)
    block = Block().eval().requires_grad_(False)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    x = torch.randn(2, 48, DIM)
    whole = run(block, x, [[48, 48]])
    pieces = run(compiled, x, [[40, 17], [8, 31]])
    error = (whole - pieces).abs().max().item()
    print(f"one piece, eager, against two pieces, compiled: largest difference {error:.1e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
