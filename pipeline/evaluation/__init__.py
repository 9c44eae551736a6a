"""How an encoder is judged: public labelled images, frozen features, every number with its spread.

stores.py     which images may be scored, and how they are read; the refusal of private ones
probe.py      linear probe and few-shot accuracy from features
held_out.py   the loss on public images that trained nothing
intervals.py  95 % intervals
evaluate.py   several encoders and the baselines over prepared sets: one table
"""
