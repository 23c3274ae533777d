"""python tools/llama2c.py FILE.bin DIR: a checkpoint of llama2.c, in Meta's layout, into DIR.
Its tokenizer.model must be copied there, too."""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.command_line import PlainParser, run_program
from support.files import DAMAGED, UserError, why, write_json, write_whole


def convert(file: Path, folder: Path) -> None:
    try:
        numbers = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32)
        dim, ffn, n, H, G, V, context = numbers[:7].view(torch.int32).tolist()
        shapes = {  # as in run.c; a name with a dot in front: of n layers; V above 0: tied
            "tok_embeddings": (1, abs(V), dim), ".attention_norm": (n, dim),
            ".attention.wq": (n, dim, dim), ".attention.wk": (n, dim // H * G, dim),
            ".attention.wv": (n, dim // H * G, dim), ".attention.wo": (n, dim, dim),
            ".ffn_norm": (n, dim), ".feed_forward.w1": (n, ffn, dim),
            ".feed_forward.w2": (n, dim, ffn), ".feed_forward.w3": (n, ffn, dim), "norm": (1, dim),
            "rope": (context, dim // H), "output": (int(V < 0), abs(V), dim),
        }
        parts = numbers[7:].split([torch.Size(shape).numel() for shape in shapes.values()])
    except DAMAGED as error:
        raise UserError(f"{file}: not in llama2.c's first format ({why(file, error)})") from None
    weights = {}
    for (name, shape), part in zip(shapes.items(), parts):
        for layer, tensor in enumerate(part.view(shape)):
            weights[f"layers.{layer}{name}.weight" if name[0] == "." else f"{name}.weight"] = tensor
    weights.setdefault("output.weight", weights["tok_embeddings.weight"])
    del weights["rope.weight"]  # a table of cosines and sines
    params = {"dim": dim, "n_layers": n, "n_heads": H, "n_kv_heads": G, "vocab_size": abs(V),
              "norm_eps": 1e-5, "max_seq_len": context}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "consolidated.00.pth", partial(torch.save, weights))
    write_json(folder / "params.json", params)  # last: it says that all is there


if __name__ == "__main__":
    parser = PlainParser(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    run_program(lambda: convert(options.file, options.folder))
