"""Vision encoders, a module for each, by `clip.projector_type` of the mmproj file. docs/ADD_A_MODEL.md shows how to add
one. A module has

    ARCHITECTURES       of the language models that take its embeddings
    MARK                what their chat templates write for an image: a token of the vocabulary
    ALONE               the same with what goes around it, for templates that know no images
    WIDENS_HEADS        False if heads must not end with zeros
    config(m)           VisionConfig, from the metadata
    prepare(model)      changes tensors of the file that the Program wants in another form
    tables(model)       vectors that ops use but the file does not have, if there are any
    tensors(c)          the name and shape of every tensor
    build(b, c)         the computation, as a list of ops: from blocks.PATCHES to blocks.EMBEDDINGS
    positions(c, table, rows, columns)  learned positions of each patch, if c.position_side: of its row and column
    parts(c, image)     what MARK becomes in a prompt: texts, and resized pixels for which embeddings come
"""

from tandem.model.lazy_modules import LazyModules

# By the projector in the file: the name of the module.
ENCODERS = LazyModules(
    __name__,
    {
        "gemma3": "gemma3",
        "gemma4uv": "gemma4u",
        "gemma4v": "gemma4",
        "idefics3": "idefics3",
        "qwen2.5vl_merger": "qwen25vl",
        "qwen3vl_merger": "qwen3vl",
    },
)
