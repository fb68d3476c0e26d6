"""Small images and model folders, each with one real fault, and the verdicts that an audit must give on them.

`expected.yaml` says what is expected and was written before the audit was run on any of them; `build` makes one.
"""
