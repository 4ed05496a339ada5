"""Makes SGLang importable on a machine without its kernels: modules that it imports and that a CPU never calls.

Python imports this in every process that has this folder on its path; the tests of this folder put it there.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types


class _Anything(types.ModuleType):
    """A module, or a name in one, of which every attribute is there."""

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> "_Anything":
        return self


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    names = ("torchvision", "sgl_kernel")

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        module = _Anything(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"  # older than anything that is asked for
        return module

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        pass


sys.meta_path.append(_Stubs())
