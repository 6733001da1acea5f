"""llama.cpp's own server, from the xllamacpp wheel: a random tiny Llama, slots saved to files.

    python llamacpp_server.py MODEL PORT FOLDER

Runs in the engine's environment. MODEL (GGUF) is written if it is not there.
"""

import os
import signal
import sys

import gguf
import numpy as np
import xllamacpp

LAYERS, WIDTH, HEADS, KV_HEADS, INNER, CONTEXT = 4, 256, 8, 4, 688, 8192
WORDS = 512
_UNKNOWN, _BEGIN, _END = 0, 1, 2
_NORMAL, _CONTROL = 1, 3


def write_model(path: str) -> None:
    """A Llama of random weights whose vocabulary is made up."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("llama")
    words = [b"<unk>", b"<s>", b"</s>"] + [f"w{n} ".encode() for n in range(3, WORDS)]
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * WORDS)
    writer.add_token_types([_CONTROL] * 3 + [_NORMAL] * (WORDS - 3))
    writer.add_unk_token_id(_UNKNOWN)
    writer.add_bos_token_id(_BEGIN)
    writer.add_eos_token_id(_END)

    def add(name: str, *shape: int) -> None:
        values = random.standard_normal(shape) * 0.02 if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(name, values.astype(np.float32))

    kv_width = WIDTH // HEADS * KV_HEADS
    add("token_embd.weight", WORDS, WIDTH)
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        add(name + "attn_norm.weight", WIDTH)
        add(name + "attn_q.weight", WIDTH, WIDTH)
        add(name + "attn_k.weight", kv_width, WIDTH)
        add(name + "attn_v.weight", kv_width, WIDTH)
        add(name + "attn_output.weight", WIDTH, WIDTH)
        add(name + "ffn_norm.weight", WIDTH)
        add(name + "ffn_gate.weight", INNER, WIDTH)
        add(name + "ffn_up.weight", INNER, WIDTH)
        add(name + "ffn_down.weight", WIDTH, INNER)
    add("output_norm.weight", WIDTH)
    add("output.weight", WORDS, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Serve until SIGTERM."""
    model, port, folder = sys.argv[1:]
    if not os.path.exists(model):
        write_model(model)
    options = xllamacpp.CommonParams()
    options.model.path = model
    options.hostnames = ["127.0.0.1"]
    options.port = int(port)
    options.n_ctx = CONTEXT
    options.n_parallel = 1
    options.slot_save_path = folder.rstrip("/") + "/"
    options.endpoint_slots = True
    options.warmup = False
    server = xllamacpp.Server(options)
    print("serving", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os._exit(0)


if __name__ == "__main__":
    main()
