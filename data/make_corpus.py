"""Make the shipped corpus from its sources: Wikipedia articles, "The Origin of Species", "The Wealth of Nations".

    python data/make_corpus.py --wikipedia wikipedia_en_2015.jsonl.xz --darwin darwin_origin_of_species.jsonl.xz \
        --smith smith_wealth_of_nations.jsonl.xz

Each source is a file of JSON lines with "id" and "text" (Wikipedia: also "url" and "title"). Books are cut into
documents at paragraphs, and all documents are shuffled with a fixed seed: any stretch of the result has the mixture
of the whole, so the parts that are held out for evaluation do, too. The result is the same bytes each time.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

SEED = 1234
ARTICLE_CHARACTERS = range(800, 12_000)  # articles of other lengths are left out: lists, and the few very long ones
WIKIPEDIA_CHARACTERS = 2_600_000
SMITH_CHARACTERS = 1_200_000
PIECE_CHARACTERS = 6_000  # a document of a book: whole paragraphs up to about this

BOOKS = {
    "darwin": ("The Origin of Species", "https://github.com/standardebooks/charles-darwin_the-origin-of-species"),
    "smith": ("The Wealth of Nations", "https://github.com/standardebooks/adam-smith_the-wealth-of-nations"),
}


def read_records(path: str) -> list[dict[str, str]]:
    """The objects of an .xz file of JSON lines."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def up_to(documents: list[dict[str, str]], num_characters: int) -> Iterator[dict[str, str]]:
    """The first documents that together have about this many characters."""
    total = 0
    for document in documents:
        if total >= num_characters:
            return
        total += len(document["text"])
        yield document


def cut_book(chapters: list[dict[str, str]], title: str, url: str) -> Iterator[dict[str, str]]:
    """Documents of whole paragraphs, none across a chapter's end."""
    for chapter in chapters:
        pieces = [""]
        for paragraph in chapter["text"].split("\n\n"):
            if len(pieces[-1]) >= PIECE_CHARACTERS:
                pieces.append("")
            pieces[-1] += ("\n\n" if pieces[-1] else "") + paragraph
        for number, piece in enumerate(pieces, start=1):
            yield {"title": f"{title}: {chapter['id']}, part {number}", "url": url, "text": piece}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("wikipedia", *BOOKS):
        parser.add_argument(f"--{name}", required=True, help="source, JSON lines packed with xz")
    parser.add_argument("--output", default=str(Path(__file__).parent / "corpus.jsonl.xz"))
    arguments = parser.parse_args()

    shuffle = random.Random(SEED).shuffle
    articles = [
        {"title": record["title"], "url": record["url"], "text": record["text"]}
        for record in read_records(arguments.wikipedia)
        if len(record["text"]) in ARTICLE_CHARACTERS
    ]
    shuffle(articles)
    documents = list(up_to(articles, WIKIPEDIA_CHARACTERS))
    documents += cut_book(read_records(arguments.darwin), *BOOKS["darwin"])
    smith = list(cut_book(read_records(arguments.smith), *BOOKS["smith"]))
    shuffle(smith)
    documents += up_to(smith, SMITH_CHARACTERS)
    shuffle(documents)
    text = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    Path(arguments.output).write_bytes(lzma.compress(text.encode("utf-8"), preset=9 | lzma.PRESET_EXTREME))
    print(f"{arguments.output}: {len(documents)} documents, {len(text.encode()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
