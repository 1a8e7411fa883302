"""Unusual Unicode text, for tests of everything that reads text."""

from __future__ import annotations

from hypothesis import strategies as st

_ALPHABETS = [
    "abcXYZ019 .,-'",
    " \t\n\r\v\f\x00\x01\x1f\x7f\x85\xa0\u1680\u2028\u2029\u3000\ufeff",
    "e\u0301\u0300\u0308\u0323\u0489\u20dd\u0627\u0654",  # combining marks, on letters and alone
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\ufe0f\U0001f3fb\U0001f1e9\U0001f1ea\u20e3",  # families, flags, keycaps
    "\u05d0\u05d1\u0627\u0644\u0639\u200f\u202b\u202c\u2066\u061c",  # right to left, with marks
    "\u200b\u200c\u200d\u2060\u00ad\u034f\u180e",  # zero width
    "東京語漢あアㄅ한ᄒ\u302a\uff21\uff76\uff9e",
    "ßİıŸǅ\ufb01\u017fẞΣςÅ\u212b½²ⅷ",  # case and compatibility
    "\ue000\uf8ff\ufffd\ufffe\uffff\ufdd0\u0378\U000e0001\U0010ffff\U000f0000\U00013430",  # private, unassigned, none
    "▁Ġ#Ċ</s>[MASK]<|endoftext|>",
]
_MARKS = ["[MASK]", "[SEP]", "<|endoftext|>", "</s>", "<unk>", "##ing", "▁the", "'s", "\r\n", "http://x.y/?z=1&w"]

hostile_texts = st.one_of(
    st.lists(
        st.one_of(*[st.text(alphabet, max_size=12) for alphabet in _ALPHABETS], st.sampled_from(_MARKS)), max_size=8
    ).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.builds(lambda character, number: character * number, st.sampled_from("xé\u0301東🎉 #"), st.integers(90, 300)),
)
"""Any text that has an encoding; half of a surrogate pair has none."""
