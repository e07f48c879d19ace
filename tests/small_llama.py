"""A small Llama in the file format of llama2.c."""

import struct

import numpy as np

WIDTH, INNER, LAYER, HEADS, PLACES = 16, 24, 2, 2, 64


WORDS = (b"<unk>", b"\n<s>\n", b"\n</s>\n", *(bytes([b]) for b in range(256)),
         b" ", b"t", b"h", b"e", b"th", b"the", b" t", b" th", b" the", b"he", b"  ",
         "ä".encode())  # fmt: skip


SIZE = len(WORDS)


def written(seed: int = 0) -> tuple[bytes, dict[str, np.ndarray]]:
    """A small model in llama2.c's layout, and its arrays by llama2.c's own names."""
    random = np.random.default_rng(seed)
    shapes = {
        "tok": (SIZE, WIDTH), "rms_att": (LAYER, WIDTH), "wq": (LAYER, WIDTH, WIDTH),
        "wk": (LAYER, WIDTH, WIDTH), "wv": (LAYER, WIDTH, WIDTH), "wo": (LAYER, WIDTH, WIDTH),
        "rms_ffn": (LAYER, WIDTH), "w1": (LAYER, INNER, WIDTH), "w2": (LAYER, WIDTH, INNER),
        "w3": (LAYER, INNER, WIDTH), "rms_final": (WIDTH,),
        "turns": (2, PLACES, WIDTH // HEADS // 2),
    }  # fmt: skip
    arrays = {k: (0.5 * random.standard_normal(v)).astype("<f4") for k, v in shapes.items()}
    head = struct.pack("<7i", WIDTH, INNER, LAYER, HEADS, HEADS, SIZE, PLACES)
    scores = (-float(i) for i in range(SIZE))
    vocabulary = struct.pack("<i", max(map(len, WORDS))) + b"".join(
        struct.pack("<fi", score, len(word)) + word
        for score, word in zip(scores, WORDS, strict=True)
    )
    return head + b"".join(a.tobytes() for a in arrays.values()) + vocabulary, arrays
