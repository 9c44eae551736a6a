"""What people read: one HTML page about a run, and the model card. Plain facts in; no torch.

facts.py    what is told, as plain dataclasses
figures.py  the charts and pictures, as data URIs
render.py   facts -> one self-contained HTML page (report.html is its template)
card.py     facts -> the model card that travels with the encoder
"""
