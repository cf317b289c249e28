"""Checkpoints in git: what they hold as text, so that ``git diff``, ``git log -p`` and ``git show`` say what changed.

git turns a file into text by a program that its configuration names (``textconv``), for the paths that an attributes
file gives the driver (``*.pth diff=ckptfix``), and keeps the text by the id of the blob (``cachetextconv``):
https://git-scm.com/docs/gitattributes#_performing_text_diffs_of_binary_files
"""
