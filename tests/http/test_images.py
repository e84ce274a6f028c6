"""Images in messages: the text that the engine gives for the same picture."""

import base64
import io
import pickle
from queue import Queue
from threading import Thread, current_thread

import pytest

import torch_hybrid as th
from tests.http.conftest import Server
from tests.tiny_models import FEWEST_LAYERS
from tests.tiny_tokenizers import image_processor
from tests.tiny_vision import PATCH, make_vision_model

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def make_engine():
    processor = image_processor(PATCH)
    ids = processor.tokenizer.convert_tokens_to_ids
    sizes = {**FEWEST_LAYERS["qwen3_5"], "vocab_size": len(processor.tokenizer)}
    hf_model = make_vision_model("qwen3_5", **sizes)
    hf_model.model.config.image_token_id = ids("<|image_pad|>")
    model = th.adapt(hf_model, vision=True)

    def make_engine():
        runner = th.Runner(model, max_seqs=2, max_tokens=32, kv_tokens=320, compile=False)
        return th.Engine(runner, processor=processor)

    return make_engine


def test_a_chat_about_an_image(make_engine):
    engine = make_engine()
    picture = Image.effect_noise((20, 16), 90).convert("RGB")
    shown = {"type": "image", "image": picture}
    asked = [{"role": "user", "content": [shown, {"type": "text", "text": "the quick"}]}]
    (expected,) = engine.generate(asked, th.Sampling(max_new_tokens=6, ignore_eos=True))

    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    asked[0]["content"][0] = part
    server = Server(engine)
    options = {"model": "demo", "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    answer = server.client.chat.completions.create(messages=asked, **options)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == len(expected.prompt)
    part["image_url"]["url"] = url[:40]
    with pytest.raises(Exception, match="the processor refuses the conversation"):
        server.client.chat.completions.create(messages=asked, **options)
    server.close()


def test_ranks_send_images(make_engine, monkeypatch):
    """Leader and follower as two threads, with a queue in the place of their process group."""
    from torch_hybrid.http import ranks

    sent, ended = Queue(), {}

    def broadcast(box, src, group):
        if current_thread() is follower:
            box[:] = pickle.loads(sent.get(timeout=60))
        else:
            sent.put(pickle.dumps(box))

    monkeypatch.setattr(ranks.dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(ranks, "_make_group", lambda: None)
    monkeypatch.setattr(ranks.TRIAL, "is_needed", True)  # the follower sets it
    engine, other = make_engine(), make_engine()
    step = other.step

    def recorded():
        events = step()
        ended.update(
            (event.request.sample, event.output.tokens) for event in events if event.output
        )
        return events

    other.step = recorded
    follower = Thread(target=ranks.follow, args=(other,), daemon=True)
    follower.start()
    shown = {"type": "image", "image": Image.effect_noise((20, 16), 90).convert("RGB")}
    asked = [{"role": "user", "content": [shown, {"type": "text", "text": "the quick"}]}]
    sampling = th.Sampling(max_new_tokens=6, ignore_eos=True, temperature=1.0, n=2)
    first, leader = engine.prepare(asked, sampling), ranks.Leader(engine)
    leader.enqueue([first])
    while engine.has_unfinished:
        leader.step()
    leader.close()
    leader.step()
    follower.join(60)
    assert not follower.is_alive()
    assert ended == {sample.sample: sample.tokens for sample in first.samples}
    assert first.images is not None
