"""A graph pass of your own, and a look at what it did.

A pass is a function of one torch.fx graph: the step as Dynamo traced it, before Inductor. This one
drops casts that change nothing. A model written for bfloat16 has many of them in float32.
"""

import torch
from torch.fx import Graph, Node

import torch_hybrid as th
from torch_hybrid.demo.task import checkpoint_path
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass

CASTS = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}


def drop_casts(graph: Graph) -> None:
    """Drop casts to the dtype that a tensor already has; every value stays the same.

    for each node that is a method call x.float(), x.bfloat16() or x.half():
        if x has that dtype already: let its users take x, and erase it
    """
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target not in CASTS:
            continue
        (source,) = node.args
        assert isinstance(source, Node)
        if source.meta["example_value"].dtype is CASTS[node.target]:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def main() -> None:
    """Compile a step with the pass and without it, and compare the logits."""
    model = th.from_pretrained(checkpoint_path())
    prompt = [[1, 2, 3, 4, 5, 6, 7]]
    logits = []
    for passes in ((Pass("drop_casts", drop_casts), *DEFAULT_PASSES), DEFAULT_PASSES):
        torch._dynamo.reset()
        runner = th.Runner(model, max_seqs=2, max_tokens=64, kv_tokens=128, passes=passes)
        logits.append(runner.extend(runner.new_sequences(1), prompt))
        (graph,) = runner.report().graphs.values()
        for record in graph.passes:
            print(f"{record.name}: {record.nodes_before} nodes -> {record.nodes_after}")
    difference = (logits[0] - logits[1]).abs().max().item()
    print(f"largest difference of the logits with the pass and without: {difference:.1e}")
    assert difference == 0


if __name__ == "__main__":
    main()
