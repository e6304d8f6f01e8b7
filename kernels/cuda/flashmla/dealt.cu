// The kernel of flashmla/wgmma with its work dealt out by what it costs: flashmla_wgmma with the
// tile DealtTile<LatentTile<...>>.
#include "dealt_list.cuh"
#include "wgmma.cu"
