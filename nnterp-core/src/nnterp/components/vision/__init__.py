"""The image side of a multimodal model: the tower, its blocks, and where its features meet the text."""
