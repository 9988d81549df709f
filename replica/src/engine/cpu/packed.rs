//! Packed weights, in memory that replicas of one model share.
//!
//! Packing takes the time to read and write all weights and needs the same amount of memory again, for every process.
//! So the result is kept as a file in the model cache, named by the digest of the model and the precision, and mapped:
//! the second replica finds it in the page cache and starts at once ([`super::packed_file`]).
//!
//! The file is a cache. If it cannot be written, or another user could change it, the weights are in private memory.

use std::fmt::Write as _;
use std::ops::Range;

use replica_core::Precision;
use sha2::{Digest, Sha256};

use super::byte_panels::{self, BytePanels};
use super::packed_file::{HEADER_BYTES, PackedCache, PackedFile, WeightsLocation};
use super::panels::{self, LinearSource, Panels, panels_of};
use crate::model::{MappedFile, ModelError};

/// Packed linear layers of a model.
pub(super) struct PackedLayers {
    memory: MappedFile,
    layers: Vec<PackedLayer>,
}

/// Packed weights of a layer.
#[derive(Clone, Copy)]
pub(super) enum PackedWeights<'a> {
    /// In f32.
    Numbers(Panels<'a>),
    /// Quantized to int8.
    Bytes(BytePanels<'a>),
}

/// Location of a layer's weights.
struct PackedLayer {
    precision: Precision,
    inputs: usize,
    panels: usize,
    /// Range after the header.
    bytes: Range<usize>,
}

impl PackedLayers {
    /// Packs the layers, or finds them packed. Weights that are not finite are rejected before they are packed, so a
    /// file of packed weights contains finite numbers only.
    pub(super) fn obtain(
        sources: &[LinearSource],
        precision: Precision,
        cache: Option<&PackedCache>,
    ) -> Result<(PackedLayers, WeightsLocation), ModelError> {
        let mut end = HEADER_BYTES;
        let layers: Vec<PackedLayer> =
            sources.iter().map(|source| PackedLayer::of(source, precision, &mut end)).collect();
        let pack_all = |memory: &mut [u8]| {
            for (source, location) in sources.iter().zip(&layers) {
                let memory = &mut memory[location.bytes.clone()];
                if location.precision == Precision::Int8 {
                    byte_panels::pack(source, memory);
                } else {
                    panels::pack(source, memory);
                }
            }
        };
        let pack = || {
            sources.iter().try_for_each(LinearSource::check_finite)?;
            Ok(MappedFile::private(end, pack_all).expect("memory for the weights of the model"))
        };
        let (memory, location) = match cache {
            None => (pack()?, WeightsLocation::PrivateMemory { problem: None }),
            Some(cache) => PackedFile::new(cache, precision, &description_of(sources), end).obtain(&pack)?,
        };
        Ok((PackedLayers { memory, layers }, location))
    }

    /// Returns the layer with this index.
    pub(super) fn layer(&self, index: usize) -> PackedWeights<'_> {
        let PackedLayer { precision, inputs, panels, bytes } = &self.layers[index];
        let numbers = self.memory.floats(bytes.start).expect("layers are aligned for floats");
        let numbers = &numbers[..bytes.len() / size_of::<f32>()];
        if *precision == Precision::Int8 {
            let bytes = &self.memory.bytes()[bytes.clone()];
            PackedWeights::Bytes(BytePanels::new(*inputs, *panels, bytes, numbers))
        } else {
            PackedWeights::Numbers(Panels::new(*inputs, numbers))
        }
    }
}

impl PackedLayer {
    /// Returns the location of a layer that starts at `end`, and advances `end`.
    fn of(source: &LinearSource, requested: Precision, end: &mut usize) -> PackedLayer {
        let inputs = source.inputs;
        let precision = if inputs > byte_panels::MAX_INPUTS { Precision::F32 } else { requested };
        let size = if precision == Precision::Int8 {
            byte_panels::packed_size(source)
        } else {
            panels::packed_size(source)
        };
        let start = *end;
        *end += size;
        PackedLayer {
            precision,
            inputs,
            panels: panels_of(source.outputs(), source.gated),
            bytes: start..*end,
        }
    }
}

/// Describes the layers so that two layers that are packed differently have different descriptions.
fn description_of(sources: &[LinearSource]) -> String {
    let mut hash = Sha256::new();
    for LinearSource { inputs, parts, bias: _, gated } in sources {
        hash.update(format!("layer {inputs} {gated}\n"));
        for (part, factor) in parts {
            hash.update(format!("part {} {:08x}\n", part.rows(), factor.to_bits()));
        }
    }
    hash.finalize().iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a String cannot fail");
        text
    })
}
