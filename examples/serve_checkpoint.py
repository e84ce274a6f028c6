"""A checkpoint behind the engine, with its tokens as they come.

The checkpoint is the demo's; any folder that ``save_pretrained`` wrote, or hub id, loads the same
way. With a tokenizer (``th.Engine(runner, tokenizer)``) prompts and outputs can be texts.
"""

import torch_hybrid as th
from torch_hybrid.demo.task import checkpoint_path, make_prompts


def main() -> None:
    """Stream four greedy answers, and sample a longer one beside them."""
    model = th.from_pretrained(checkpoint_path())
    # compile=True is the default; an eager runner takes the same path and starts at once.
    runner = th.Runner(model, max_seqs=8, max_tokens=256, kv_tokens=4096, compile=False)
    prompts = [prompt.tokens for prompt in make_prompts(5, seed=0)]
    greedy = th.Sampling(max_new_tokens=8)
    drawn = th.Sampling(max_new_tokens=20, temperature=0.8, top_p=0.9, seed=1)

    with th.Engine(runner) as engine:
        for event in engine.generate(prompts, [greedy] * 4 + [drawn], stream=True):
            print(f"prompt {event.request.index}: token {event.token}")
            if event.output is not None:
                output = event.output
                print(f"prompt {output.index}: {output.finish_reason} after {output.tokens}")
    assert runner.free_slots == 8


if __name__ == "__main__":
    main()
