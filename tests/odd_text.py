"""A text with characters of many alphabets, to be learned in place of a download."""

ODD = "naïve 漢字 \U0001f600\t– " + "".join(map(chr, range(33, 80)))


TEXT = "".join(f"{i * i} {ODD[i % 50 :]} the {i}th line\n" for i in range(800)) + "Ω ends it"
