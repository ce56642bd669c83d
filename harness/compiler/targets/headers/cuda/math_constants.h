// Generated CUDA source includes this for infinity and NaN, which cuda.h here has.
#pragma once
