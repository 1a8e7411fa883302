from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from megatron01.convert.huggingface import to_hf_config
from megatron01.evaluate.generation import Sampling, choose, generate, generate_steps
from megatron01.models.layers import KeyValueCache
from tests.unit.convert.trained import to_hf

GREEDY = Sampling(greedy=True)
PROMPTS = [[5, 6, 7, 8], [1], [2, 40, 3, 9, 11, 30, 4]]


def without_cache(model, prompt, count, stop=None):
    """Greedy decoding without a cache: the whole text goes through the model for each token."""
    text = list(prompt)
    for _ in range(count):
        if len(text) == model.config.max_position_embeddings:
            break
        with torch.no_grad():
            token = int(model(torch.tensor([text]))[0, -1].argmax())
        if token == stop:
            break
        text.append(token)
    return text[len(prompt) :]


def test_a_batch_of_any_lengths_equals_each_text_alone(gpt2):
    expected = [without_cache(gpt2, prompt, 12) for prompt in PROMPTS]
    assert generate(gpt2, PROMPTS, max_new_tokens=12, sampling=GREEDY) == expected
    assert [generate(gpt2, [p], max_new_tokens=12, sampling=GREEDY)[0] for p in PROMPTS] == expected
    assert len({tuple(text) for text in expected}) == 3  # all different, so that a mix-up would show


def test_the_end_of_a_document_ends_one_text_and_not_the_others(gpt2):
    expected = [without_cache(gpt2, prompt, 12) for prompt in PROMPTS]
    stop = next(token for token in expected[0] if token not in expected[2])
    ended = [text[: text.index(stop)] if stop in text else text for text in expected]
    assert len(ended[0]) < 12 == len(ended[2])
    assert generate(gpt2, PROMPTS, max_new_tokens=12, sampling=GREEDY, stop=stop) == ended


def test_the_last_position_ends_a_text(gpt2):
    texts = generate(gpt2, [[1] * 18, [2] * 5, [3] * 20], max_new_tokens=50, sampling=GREEDY)
    assert [len(text) for text in texts] == [2, 15, 0]
    assert texts[1] == without_cache(gpt2, [2] * 5, 50)


def test_it_equals_transformers(gpt2):
    theirs = GPT2LMHeadModel(GPT2Config(**to_hf_config(gpt2.config, gpt2.vocab_size, eod=0))).eval()
    theirs.load_state_dict(to_hf(gpt2.state_dict(), gpt2.config, gpt2.vocab_size))
    theirs.generation_config.eos_token_id = None
    prompts = torch.tensor([[5, 6, 7, 8], [0, 0, 1, 2]])
    attention_mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    found = theirs.generate(prompts, attention_mask=attention_mask, max_new_tokens=14, do_sample=False, pad_token_id=0)
    ours = generate(gpt2, [[5, 6, 7, 8], [1, 2]], max_new_tokens=14, sampling=GREEDY)
    assert ours == found[:, 4:].tolist()


def test_the_logits_are_those_of_the_whole_text(gpt2):
    texts = torch.tensor([PROMPTS[2], [0, 0, 0, 1, 2, 3, 4]])
    cache = KeyValueCache(2, 7, torch.tensor([0, 3]))
    with torch.no_grad():
        for start, end in ((0, 4), (4, 5), (5, 7)):
            logits = gpt2.next_token_logits(texts[:, start:end], cache)
            torch.testing.assert_close(logits[0], gpt2(texts[:1, :end])[0, -1], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(logits[1], gpt2(texts[1:, 3:end])[0, -1], rtol=1e-5, atol=1e-5)


def test_sampling_is_the_same_alone_and_in_a_batch(gpt2):
    sampling = Sampling(temperature=1.3, top_k=20, top_p=0.95)

    def draw(prompts, first):
        generators = [np.random.default_rng([7, first + index]) for index in range(len(prompts))]
        return generate(gpt2, prompts, max_new_tokens=10, sampling=sampling, generators=generators)

    together = draw(PROMPTS, 0)
    assert together == [draw([prompt], index)[0] for index, prompt in enumerate(PROMPTS)]
    assert together != draw(PROMPTS, 3)


def test_tokens_come_one_by_one(gpt2):
    steps = generate_steps(gpt2, PROMPTS, max_new_tokens=3, sampling=GREEDY)
    assert not torch.is_inference_mode_enabled()
    first = next(steps)
    assert not torch.is_inference_mode_enabled()  # code of the caller between two tokens does not run in it
    assert [[a, *b] for a, b in zip(first, zip(*steps, strict=True), strict=True)] == generate(
        gpt2, PROMPTS, max_new_tokens=3, sampling=GREEDY
    )


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_p=0.69), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_p=0.71), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(top_p=1e-9), [0, 1, 0, 0]),
        (Sampling(temperature=0.5), [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        (Sampling(temperature=0.5, top_k=3, top_p=0.5), [0, 1, 0, 0]),
        (Sampling(temperature=1e-320), [0, 1, 0, 0]),
        (Sampling(greedy=True), [0, 1, 0, 0]),
    ],
)
def test_shares_of_draws(sampling, expected):
    count = 2000
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(count, -1)
    generators = [np.random.default_rng([0, index]) for index in range(count)]
    shares = np.bincount(choose(logits, sampling, generators).numpy(), minlength=4) / count
    np.testing.assert_allclose(shares, expected, atol=0.05)
    assert all((share == 0) == (wanted == 0) for share, wanted in zip(shares, expected, strict=True))


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_k=40), Sampling(top_p=0.7), Sampling(temperature=0.3, top_k=90, top_p=0.9)]
)
def test_among_equal_logits_lower_ids_come_first(sampling):
    logits = torch.randn(300, 200, generator=torch.Generator().manual_seed(1)).round(decimals=1)  # many are equal
    scores, ids = logits.double().sort(descending=True, stable=True)
    probabilities = (scores / sampling.temperature).softmax(-1)
    if sampling.top_k:
        probabilities = probabilities[:, : sampling.top_k]
    probabilities /= probabilities.sum(-1, keepdim=True)
    kept = probabilities.cumsum(-1) - probabilities < sampling.top_p
    cumulative = (probabilities * kept).cumsum(-1)
    draws = torch.tensor([np.random.default_rng([3, row]).random() for row in range(300)], dtype=torch.float64)
    places = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)
    chosen = choose(logits, sampling, [np.random.default_rng([3, row]) for row in range(300)])
    assert torch.equal(chosen[:, None], ids.gather(1, places))


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=9),
    st.floats(0.05, 5),
    st.integers(0, 10),
    st.floats(1e-6, 1),
    st.integers(0, 10**6),
)
def test_a_draw_is_always_one_of_the_kept(logits, temperature, top_k, top_p, seed):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    token = int(choose(torch.tensor([logits]), sampling, [np.random.default_rng([seed, 0])]))
    probabilities = torch.softmax(torch.tensor(logits).double() / temperature, 0)
    better = probabilities[probabilities > probabilities[token]]
    assert not top_k or len(better) < top_k
    if top_k:
        probabilities = probabilities / probabilities.topk(min(top_k, len(logits))).values.sum()
    assert float(probabilities[probabilities > probabilities[token]].sum()) < top_p + 1e-9
