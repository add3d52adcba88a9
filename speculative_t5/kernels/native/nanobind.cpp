// nanobind's own part of an extension, whose path is the build environment's.
#include "nb_combined.cpp"
