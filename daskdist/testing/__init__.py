r"""Law suites for authors of nodes, formats, devices, sharding policies and backends; `verify_visitation` for users.

A suite is a class of tests. Subclass it in a test file, override the methods that provide the objects under test, and
run pytest::

    class TestCsv(FormatLaws):
        def make_format(self):
            return Csv()

        def write(self, directory):
            path = directory / "a.csv"
            path.write_text("1\n2\n")
            return {str(path): [np.int64(1), np.int64(2)]}

A law that does not hold raises `AssertionError` with a message that names the law and the object.
"""

from daskdist.testing.backends import BackendLaws
from daskdist.testing.devices import DeviceLaws
from daskdist.testing.distribution import DistributionLaws, SimulatedWorkers, afresh
from daskdist.testing.equality import check, same_element, same_elements, same_multiset
from daskdist.testing.faults import Fault
from daskdist.testing.formats import FormatLaws
from daskdist.testing.never_run import never_run
from daskdist.testing.nodes import Elements, NodeLaws, elements_of
from daskdist.testing.policies import PolicyLaws
from daskdist.testing.visitation import VisitationReport, verify_visitation

__all__ = [
    "BackendLaws",
    "DeviceLaws",
    "DistributionLaws",
    "Elements",
    "Fault",
    "FormatLaws",
    "NodeLaws",
    "PolicyLaws",
    "SimulatedWorkers",
    "VisitationReport",
    "afresh",
    "check",
    "elements_of",
    "never_run",
    "same_element",
    "same_elements",
    "same_multiset",
    "verify_visitation",
]
