"""regard inside what people already use. Nothing here is imported by the rest of regard; import what you need:

- `regard.integrations.transformers`: `attn_implementation="regard"` for models of transformers.
- `regard.integrations.callbacks`: `regard.monitor` in the trainers of transformers and Lightning, in TensorBoard and in
  Weights & Biases.
"""
