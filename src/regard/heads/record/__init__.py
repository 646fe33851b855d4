"""Recording: a `Record` holds a `LayerRecord` per layer, made of sequences; tables and files of them."""
