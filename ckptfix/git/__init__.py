"""Checkpoints in git: their contents as text, so that ``git diff``, ``git log -p`` and ``git show`` show changes.

git converts a file to text with a program from its configuration (``textconv``), for the paths to which an
attributes file assigns the driver (``*.pth diff=ckptfix``), and caches the text by blob id (``cachetextconv``):
https://git-scm.com/docs/gitattributes#_performing_text_diffs_of_binary_files
"""
