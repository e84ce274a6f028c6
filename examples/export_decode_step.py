"""A whole decode step as an AOTInductor package, run by a process that compiles nothing.

A hybrid of two layers is exported with every size free and packaged with its weights. A second
process, which finds no compiler, runs it. That process imports torch_hybrid, since the package
calls the ops by name. It plans its steps as usual, with the implementations of the package: the
torch ones here, since those in C++ look for the compiler that built them.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection, export
from torch.utils import _pytree as pytree

import torch_hybrid as th
from torch_hybrid.layers import GatedDeltaNet, PagedAttention

DIM, WIDTH, VOCAB_SIZE = 32, 16, 50
LINEAR = th.DeltaRuleSpec(
    num_k_heads=2, num_v_heads=2, head_k_dim=WIDTH, head_v_dim=WIDTH, conv_width=4
)
FULL = th.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=WIDTH, scale=WIDTH**-0.5)
TABLE = th.LayerTable.from_specs([LINEAR, FULL])
BACKENDS = th.Backends(full="torch", linear="torch", conv="torch")
TEXTS = torch.randint(VOCAB_SIZE, (3, 20), generator=torch.Generator().manual_seed(1)).tolist()


class LanguageModel(nn.Module):
    """A model of an embedding, one layer of each kind, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB_SIZE, DIM), nn.Linear(DIM, VOCAB_SIZE)
        self.out = nn.Linear(4 * WIDTH, DIM)
        self.linear, self.full = GatedDeltaNet(DIM, LINEAR), PagedAttention(FULL)
        self.qkv = nn.Linear(DIM, (4 + 2 + 2) * WIDTH)

    def forward(self, tokens: Tensor, step: th.Step) -> Tensor:
        """Compute logits [T, VOCAB_SIZE] of tokens [T]."""
        x = self.embed(tokens)
        _, plan, cache = step.layer(0)
        x = x + self.linear(x, plan, cache)
        _, plan, kv = step.layer(1)
        q, k, v = self.qkv(x).unflatten(-1, (-1, WIDTH)).split([4, 2, 2], dim=1)
        return self.head(x + self.out(self.full(q, k, v, plan, kv).flatten(1)))


class Server:
    """Sequences, and decode steps of one token for each."""

    def __init__(self, max_seqs: int) -> None:
        self.cache = th.HybridCache(TABLE, max_seqs=max_seqs, kv_tokens=256, page_size=16)
        self.backends = th.make_backends(TABLE, self.cache.sizes, BACKENDS, [th.Mode.DECODE])

    def step(self, seqs: list[th.Sequence], tokens: list[int]) -> tuple[Tensor, th.Step]:
        """Make the arguments of the model for one step."""
        batch = self.cache.make_batch(seqs, [[token] for token in tokens])
        plans = th.plan_all(self.backends, batch, th.Mode.DECODE)
        return batch.tokens, th.Step(plans=plans, caches=self.cache.pools, table=TABLE)

    def serve(self, model: nn.Module, texts: list[list[int]]) -> Tensor:
        """Decode texts of one length; return the logits after each token."""
        seqs, logits = self.cache.allocate(len(texts)), []
        for tokens in zip(*texts, strict=True):
            with torch.inference_mode():
                logits.append(model(*self.step(seqs, list(tokens))).clone())
            self.cache.commit(seqs, [1] * len(seqs))
        return torch.stack(logits)


def package(model: nn.Module, path: Path) -> None:
    """Export one step of a few sequences, its sizes free, and compile it into a file."""
    server = Server(max_seqs=8)
    arguments = server.step(server.cache.allocate(5), [0] * 5)
    shapes = ShapesCollection()
    for tensor in pytree.tree_leaves(arguments):
        shapes[tensor] = dict.fromkeys(range(tensor.ndim), Dim.AUTO)
    with torch.no_grad():
        exported = export(model, arguments, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path))


def load_and_serve(folder: Path) -> None:
    """Run the package in the second process, and save its logits."""
    model = torch._inductor.aoti_load_package(str(folder / "step.pt2"))
    torch.save(Server(max_seqs=3).serve(model, TEXTS), folder / "logits.pt")


def main() -> None:
    """Compare the package in another process with the module in this one."""
    torch.manual_seed(0)
    model = LanguageModel().eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package(model, folder / "step.pt2")
        (folder / "bin").mkdir()
        without_compilers = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX")}
        without_compilers["PATH"] = str(folder / "bin")
        command = [sys.executable, __file__, name]
        subprocess.run(command, env=without_compilers, check=True)
        packaged = torch.load(folder / "logits.pt")
    error = (packaged - Server(max_seqs=3).serve(model, TEXTS)).abs().max().item()
    print(f"packaged, without a compiler, against eager: largest difference {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    if len(sys.argv) > 1:
        load_and_serve(Path(sys.argv[1]))
    else:
        main()
