"""Questions about images: prompts with images, served beside prompts without.

The checkpoint is a random Qwen3.5 of two layers with a tower of one, so its answer means nothing.
But it is the answer of transformers' own generate to the same image. A real checkpoint comes with
its processor: ``transformers.AutoProcessor.from_pretrained(path)``, which wants Pillow and
torchvision (``pip install torch-hybrid[vision]``).
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import torch_hybrid as th

PATCH, MERGE = 8, 2  # pixels along a patch; patches along a merged row of the tower's output
MARKS = ["<|end|>", "<|user|>", "<|assistant|>"]
VISION_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = """
{%- for message in messages -%}
<|{{ message.role }}|>
{%- for part in message.content -%}
{%- if part.type == "image" -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


class ImageProcessor(Qwen3VLProcessor):
    """The model's processor without its part for videos, which wants torchvision."""

    def __init__(self, image_processor, tokenizer, chat_template):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def make_processor() -> ImageProcessor:
    """Make a processor: each byte is a token, and images are cut into patches for the tower."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: at for at, token in enumerate([*MARKS, *VISION_MARKS, *alphabet])}
    bytes_alone = Tokenizer(models.BPE(vocab, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone,
        eos_token=MARKS[0],
        additional_special_tokens=[*MARKS[1:], *VISION_MARKS],
    )
    pixels = {"shortest_edge": 16 * PATCH**2, "longest_edge": 64 * PATCH**2}
    cutter = Qwen2VLImageProcessorPil(size=pixels, patch_size=PATCH, merge_size=MERGE)
    return ImageProcessor(cutter, tokenizer, CHAT_TEMPLATE)


def make_model(processor: ImageProcessor) -> Qwen3_5ForConditionalGeneration:
    """Make a random model of transformers whose tower takes this processor's patches."""
    torch.manual_seed(0)
    ids = processor.tokenizer.convert_tokens_to_ids
    config = Qwen3_5Config(
        text_config={
            "vocab_size": len(processor.tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [6, 5, 5],
            },
            "initializer_range": 0.2,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "initializer_range": 0.2,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return Qwen3_5ForConditionalGeneration(config).eval()


def make_image(seed: int) -> Image.Image:
    """Draw an image of random colours, 40 pixels wide."""
    colours = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((40, 56))


def question(text: str, *images: Image.Image) -> list[dict]:
    """Make a user's message about images."""
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def as_transformers(hf_model, processor: ImageProcessor, conversation: list[dict]) -> list[int]:
    """Generate the tokens of transformers' own greedy generate."""
    inputs = processor.apply_chat_template(
        conversation,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = hf_model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def main() -> None:
    """Ask about one image, about two, and about none, in one batch."""
    processor = make_processor()
    hf_model = make_model(processor)
    questions = [
        question("What is this?", make_image(0)),
        question("Which of the two is darker?", make_image(1), make_image(0)),
        question("Who are you?"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        model = th.from_pretrained(Path(folder), vision=True)
    # compile=True is the default; an eager runner takes the same path and starts at once.
    # Steps of 32 tokens cut the images' rows into several steps.
    runner = th.Runner(model, max_seqs=4, max_tokens=32, kv_tokens=1024, compile=False)
    engine = th.Engine(runner, processor=processor)
    outputs = sorted(
        engine.generate(questions, th.Sampling(max_new_tokens=12)), key=lambda out: out.index
    )
    for output, conversation in zip(outputs, questions, strict=True):
        print(f"{len(output.prompt)} tokens: {output.text!r}")
        assert output.tokens == as_transformers(hf_model, processor, conversation)
    print("the tokens are those of transformers")


if __name__ == "__main__":
    main()
