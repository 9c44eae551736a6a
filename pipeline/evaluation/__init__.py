"""How an encoder is judged: public labelled images, frozen features, every number with its spread.

probe.py     linear probe and few-shot accuracy from features; the refusal of private images
evaluate.py  several encoders and the baselines over prepared sets: one table
"""
