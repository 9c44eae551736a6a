"""What is trained: masked autoencoders on timm blocks; this room knows nothing of privacy.

sizes.py   the named sizes and their parameter counts (no torch)
mae.py     images, mask uniforms -> loss per image; features; pictures
export.py  the encoder as a timm / Hugging Face directory
"""
