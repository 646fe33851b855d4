"""regard inside what people already use. Nothing here is imported by the rest of regard; import what you need:

- `regard.integrations.transformers`: `attn_implementation="regard"` for models of transformers.
"""
