"""The commands ``megatron01 generate``, ``fill-mask`` and ``perplexity``."""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from megatron01.config.commands import FillMaskConfig, GenerateConfig, InferenceConfig, PerplexityConfig
from megatron01.convert.formats import LoadedModel, load_model
from megatron01.data.tokenizers import Tokenizer, TokenizerFiles
from megatron01.errors import UserError, require
from megatron01.evaluate.generation import (
    Sampling,
    continuation,
    encode_with_masks,
    fill_masks,
    generate_steps,
    pieces,
)
from megatron01.evaluate.generation import generate as generate_tokens
from megatron01.evaluate.perplexity import read_documents, read_held_out, token_losses
from megatron01.models.gpt2 import GPT2
from megatron01.utils.files import write_atomically, writing

ItemT = TypeVar("ItemT")


def generate(config: GenerateConfig) -> None:
    """Continue texts from flags, a file or standard input. Raises UserError if the model or a text cannot be used."""
    texts = list(config.text or ())
    if config.input is not None:
        texts = read_documents(str(config.input), by_line=True)
        require(any(texts), f"input {config.input} holds no text; expected one to continue in each line")
    if config.output is not None:
        with writing(f"the folder {config.output.parent} of output"):
            config.output.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=config.output.parent).close()
        if config.output.is_dir():
            raise UserError(f"output {config.output} cannot be written: Is a directory")
    loaded = _load(config)
    model, tokenizer = loaded.gpt2(), loaded.tokenizer
    sampling = Sampling(greedy=config.greedy, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
    stop = tokenizer.eod if config.stop_at_eod else None
    settings = {"max_new_tokens": config.max_new_tokens, "sampling": sampling, "stop": stop}
    if config.interactive:
        _interactive(config, model, tokenizer, settings)
        return
    jobs = [(text, _encode(text, model, tokenizer)) for text in texts for _ in range(config.num_samples)]
    lines = []
    for batch in _in_batches(enumerate(jobs), config.batch_size):
        generators = [np.random.default_rng([config.seed, number]) for number, _ in batch]
        prompts = [prompt for _, (_, prompt) in batch]
        continuations = generate_tokens(model, prompts, generators=generators, **settings)
        for (number, (text, prompt)), ids in zip(batch, continuations, strict=True):
            completion = continuation(prompt, ids, tokenizer)
            if config.output is not None:
                lines.append(json.dumps({"prompt": text, "completion": completion, "tokens": len(ids)}) + "\n")
            else:
                heading = f"--- {number + 1} of {len(jobs)}\n" if len(jobs) > 1 else ""
                print(f"{heading}{text}{completion}")
    if config.output is not None:
        with writing(f"output {config.output}"):
            write_atomically(config.output, "".join(lines))


def fill_mask(config: FillMaskConfig) -> None:
    """Print proposals for the masks of texts from flags, or of the lines of standard input.

    Raises UserError if the model or a text cannot be used.
    """
    loaded = _load(config)
    model, tokenizer = loaded.bert(), loaded.tokenizer
    length = model.config.max_position_embeddings
    texts = config.text if config.text is not None else (line.removesuffix("\n") for line in sys.stdin if line.strip())
    is_typed = config.text is None and sys.stdin.isatty()  # one line at a time, without batches
    for batch in _in_batches(texts, 1 if is_typed else config.batch_size):
        try:
            encoded = [encode_with_masks(text, tokenizer, max_length=length) for text in batch]
        except UserError as error:
            if not is_typed:
                raise
            print(f"error: {error}", file=sys.stderr)
            continue
        for text, masks in zip(batch, fill_masks(model, tokenizer, encoded, top_k=config.top_k), strict=True):
            if config.json:
                proposals = [[{"token": p.token, "probability": p.probability} for p in mask] for mask in masks]
                print(json.dumps({"text": text, "masks": proposals}))
                continue
            print(text)
            for number, mask in enumerate(masks, start=1):
                shown = "  ".join(f"{proposal.token} {proposal.probability:.3f}" for proposal in mask)
                print(f"  {number}: {shown}" if len(masks) > 1 else f"  {shown}")


def perplexity(config: PerplexityConfig) -> None:
    """Print how well a model predicts a text. Raises UserError if the model or the text cannot be used."""
    loaded = _load(config)
    model, tokenizer = loaded.gpt2(), loaded.tokenizer
    window = model.config.max_position_embeddings if config.window is None else config.window
    if window > model.config.max_position_embeddings:
        raise UserError(f"window is {window}; the model has {model.config.max_position_embeddings} positions")
    stride = max(1, window // 2) if config.stride is None else config.stride
    if stride > window:
        raise UserError(f"stride {stride} is above the window of {window}, so tokens would be left out; lower it")
    text = read_held_out(config.input, tokenizer, config.max_tokens)
    with tqdm(total=text.tokens.size - 1, unit=" tokens", disable=None, file=sys.stderr) as bar:
        losses = token_losses(
            model, text.tokens, window=window, stride=stride, batch_size=config.batch_size, progress=bar.update
        )
    counts = {"tokens": losses.size, "words": text.num_words, "bytes": text.num_bytes}
    scores = text.scores(float(np.mean(losses)))
    if config.json:
        entries = {"data": config.input, "window": window, "stride": stride, **counts, **scores}
        print(json.dumps({key: None if value == math.inf else value for key, value in entries.items()}))
        return
    print(f"{config.input}: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    print(f"  loss                  {scores['loss']:.4f} nats per token (window {window}, stride {stride})")
    print(f"  perplexity per token  {scores['perplexity_per_token']:.2f}")
    print(f"  perplexity per word   {scores['perplexity_per_word']:.2f}")
    print(f"  bits per byte         {scores['bits_per_byte']:.4f}")


def _load(config: InferenceConfig) -> LoadedModel:
    loaded = load_model(config.load, TokenizerFiles.given(config), dtype=config.dtype, device=config.device)
    for note in loaded.notes:
        print(f"WARNING: {note}", file=sys.stderr)
    return loaded


def _encode(text: str, model: GPT2, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text; for an empty text, the end-of-document token alone."""
    try:
        ids = tokenizer.encode(text)
    except UnicodeEncodeError as error:
        raise UserError(f"a text holds bytes that are not UTF-8: {text[:40]!r}") from error
    if not ids:
        if tokenizer.eod is None:
            raise UserError("a text is empty, and the tokenizer has no end-of-document token to begin with; write one")
        return [tokenizer.eod]
    positions = model.config.max_position_embeddings
    if len(ids) >= positions:
        raise UserError(
            f"a text has {len(ids)} tokens and the model {positions} positions, so nothing can follow; shorten"
            f" {text[:40]!r}"
        )
    return ids


def _interactive(config: GenerateConfig, model: GPT2, tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    """Continue each line of standard input, printing tokens as they are generated."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("A text to continue in each line; Ctrl-D ends.", file=sys.stderr)
    number = 0
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        text = line.removesuffix("\n")
        try:
            prompt = _encode(text, model, tokenizer)
        except UserError as error:
            if not is_terminal:
                raise
            print(f"error: {error}", file=sys.stderr)
            continue
        for _ in range(config.num_samples):
            generator = np.random.default_rng([config.seed, number])
            steps = generate_steps(model, [prompt], generators=[generator], **settings)
            number += 1
            print(text, end="", flush=True)
            for piece in pieces(prompt, (token for (token,) in steps if token is not None), tokenizer):
                print(piece, end="", flush=True)
            print()


def _in_batches(items: Iterable[ItemT], size: int) -> Iterator[list[ItemT]]:
    items = iter(items)
    while batch := list(itertools.islice(items, size)):
        yield batch
