"""The build backend: that of setuptools, which is told where numpy's headers are.

pyproject.toml cannot say it: that is known only where numpy was installed for the build. Not imported by the package.
"""

import os
import shlex

import numpy
from setuptools.build_meta import *  # noqa: F403

os.environ["CPPFLAGS"] = f"{os.environ.get('CPPFLAGS', '')} {shlex.quote(f'-I{numpy.get_include()}')}"
