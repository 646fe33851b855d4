"""regard inside what people already use. Nothing here is imported by the rest of regard; import what you need:

- `regard.integrations.transformers`: `attn_implementation="regard"` for models of transformers.
- `regard.integrations.diffusers`: the attention backend "regard" for models of diffusers, and `use(model)`.
- `regard.integrations.sdpa`: torch's `scaled_dot_product_attention` on regard's kernels, for code that calls it.
- `regard.integrations.callbacks`: `regard.monitor` in the trainers of transformers and Lightning, in TensorBoard and in
  Weights & Biases.
"""
