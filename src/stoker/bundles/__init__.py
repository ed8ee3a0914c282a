"""Packaging: samples of low importance come many at a time, each package one read.

The one arrow: ``Packager`` (in each rank) says which samples are of low importance; the process
lets ``pack`` decide which of them come together, its ``Builder`` gathers and stores them in the
``Depot``, and its ``PackageLoader`` brings package after package into the cache as samples are
served. If the process dies, workers read for themselves.
"""

from stoker.bundles.packager import Packager, Packaging

__all__ = ["Packager", "Packaging"]
