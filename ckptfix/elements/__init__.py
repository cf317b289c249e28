"""The elements of tensors: read in blocks, in constant memory and on several cores, and reduced to a few numbers.

Every verb that looks at values is a user of this room: `reader` locates the elements of a tensor and reads them,
`arrays` decodes and rounds them, and the reducers are what is computed from them: `moments`, `histogram`, `nonfinite`
and, for two tensors, `comparison`.
"""
