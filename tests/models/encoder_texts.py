"""The texts of goldens/encoders/."""

TEXTS = [
    "the cat sat on the mat.",
    "Unbelievable!",
    "a",
    "b, c, zebra",
    " ".join(["the cats sat on a mat,"] * 9),
]
QUERY = TEXTS[0]  # of models that rank
