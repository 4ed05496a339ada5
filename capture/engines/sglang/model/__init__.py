"""What SGLang's model registry is given (SGLANG_EXTERNAL_MODEL_PACKAGE): the target's own class, with eyas' hooks.

The registry imports every module of this package and takes its ``EntryClass``. Nothing else belongs here.
"""
