"""Makes the wheel in the folder that tools/wheel.sh lays out: gtrain/, bin/, lib/ and a file with the version."""
import glob

from setuptools import Distribution, setup
from wheel.bdist_wheel import bdist_wheel


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        """What is built is of one platform and of any Python: ctypes loads it."""
        return "py3", "none", super().get_tag()[2]


with open("VERSION") as version:
    setup(version=version.read().strip(), packages=["gtrain"],
          data_files=[(folder, sorted(glob.glob(folder + "/*"))) for folder in ("bin", "lib")],
          distclass=PlatformDistribution, cmdclass={"bdist_wheel": PlatformWheel})
