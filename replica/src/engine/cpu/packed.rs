//! Packed weights, in memory that replicas of one model share.
//!
//! Packing takes the time to read and write all weights and comes to as much memory again, for every process. So the
//! result is kept as a file beside the model cache, named by the digest of the model and the precision, and mapped: the
//! second replica finds it in the page cache and starts at once. Replicas that start together wait for the first of them.
//! The file is written under another name, flushed, and renamed: what has its name is whole. Its header says what it was
//! made of (layout, sizes and factors of the layers), so that another version of the engine makes it anew.
//!
//! It is a cache. If it cannot be written the weights are private memory, and the engine works all the same.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use replica_core::Precision;
use sha2::{Digest, Sha256};

use super::byte_panels::{self, BytePanels};
use super::linear::LinearSource;
use super::panels::{self, Panels, panels_of};
use crate::model::MappedFile;

/// To be raised with every change of what a packed file holds.
const LAYOUT: &str = "panel32-v2";

/// The file's first page says what it is; weights begin on the second.
const HEADER_BYTES: usize = 4096;

/// Where packed weights are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedCache {
    /// The folder; it is made if it does not exist.
    pub folder: PathBuf,
    /// The digest of the model: equal digests must mean equal weights.
    pub digest: String,
}

impl PackedCache {
    /// The place in the model cache at `root` for a model of this digest.
    pub fn below(root: &Path, digest: impl Into<String>) -> PackedCache {
        PackedCache { folder: root.join("packed"), digest: digest.into() }
    }
}

/// Where an engine's packed weights are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightsPlace {
    /// In a mapped file, which all replicas of the model share.
    SharedFile(PathBuf),
    /// In memory of this process.
    OwnMemory {
        /// Why not in a file, if one was wanted.
        problem: Option<String>,
    },
}

/// The linear layers of a model, packed.
pub(super) struct Packed {
    memory: MappedFile,
    layers: Vec<Place>,
}

/// The weights of a layer.
#[derive(Clone, Copy)]
pub(super) enum Weights<'a> {
    /// As they are.
    Numbers(Panels<'a>),
    /// Rounded.
    Bytes(BytePanels<'a>),
}

/// Where a layer's weights are.
struct Place {
    precision: Precision,
    inputs: usize,
    panels: usize,
    /// Behind the header.
    bytes: Range<usize>,
}

impl Packed {
    /// Packs the layers, or finds them packed.
    pub(super) fn obtain(
        sources: &[LinearSource],
        precision: Precision,
        cache: Option<&PackedCache>,
    ) -> (Packed, WeightsPlace) {
        let mut end = HEADER_BYTES;
        let layers: Vec<Place> =
            sources.iter().map(|source| Place::of(source, precision, &mut end)).collect();
        let pack_all = |memory: &mut [u8]| {
            for (source, place) in sources.iter().zip(&layers) {
                let memory = &mut memory[place.bytes.clone()];
                if place.precision == Precision::Int8 {
                    byte_panels::pack(source, memory);
                } else {
                    panels::pack(source, memory);
                }
            }
        };
        let own = || MappedFile::private(end, pack_all).expect("memory for the weights of the model");
        let file =
            cache.map(|cache| PackedFile::new(cache, precision, &described(sources), end).obtain(&own));
        let (memory, place) = match file {
            Some(Ok((file, path))) => (file, WeightsPlace::SharedFile(path)),
            Some(Err(error)) => (own(), WeightsPlace::OwnMemory { problem: Some(error.to_string()) }),
            None => (own(), WeightsPlace::OwnMemory { problem: None }),
        };
        (Packed { memory, layers }, place)
    }

    /// The layer of this index.
    pub(super) fn layer(&self, index: usize) -> Weights<'_> {
        let Place { precision, inputs, panels, bytes } = &self.layers[index];
        let numbers = self.memory.floats(bytes.start).expect("layers begin where numbers can begin");
        let numbers = &numbers[..bytes.len() / size_of::<f32>()];
        if *precision == Precision::Int8 {
            let bytes = &self.memory.bytes()[bytes.clone()];
            Weights::Bytes(BytePanels::new(*inputs, *panels, bytes, numbers))
        } else {
            Weights::Numbers(Panels::new(*inputs, numbers))
        }
    }
}

impl Place {
    /// The place of a layer when so much is taken; then more is.
    fn of(source: &LinearSource, wanted: Precision, end: &mut usize) -> Place {
        let inputs = source.inputs;
        let precision = if inputs > byte_panels::MAX_INPUTS { Precision::F32 } else { wanted };
        let size = if precision == Precision::Int8 {
            byte_panels::packed_size(source)
        } else {
            panels::packed_size(source)
        };
        let start = *end;
        *end += size;
        Place { precision, inputs, panels: panels_of(source.outputs(), source.gated), bytes: start..*end }
    }
}

/// What layers are made of, in so many words that two that are packed differently are described differently.
fn described(sources: &[LinearSource]) -> String {
    let mut hash = Sha256::new();
    for LinearSource { inputs, parts, bias: _, gated } in sources {
        hash.update(format!("layer {inputs} {gated}\n"));
        for (part, factor) in parts {
            hash.update(format!("part {} {:08x}\n", part.rows(), factor.to_bits()));
        }
    }
    hash.finalize().iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes what is written");
        text
    })
}

/// A file of packed weights, made or not.
struct PackedFile {
    path: PathBuf,
    header: [u8; HEADER_BYTES],
    length: usize,
}

impl PackedFile {
    fn new(cache: &PackedCache, precision: Precision, layers: &str, length: usize) -> PackedFile {
        // A digest is a file name; whatever else was given, the header has it in full.
        let name: String =
            cache.digest.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let order = if cfg!(target_endian = "little") { "little" } else { "big" };
        let precision = precision.as_str();
        let text = format!(
            "meridian packed weights\nlayout {LAYOUT}\nprecision {precision}\nbytes {order} end first\n\
             length {length}\nlayers {layers}\nmodel {}\n",
            cache.digest
        );
        let mut header = [0; HEADER_BYTES];
        let end = text.len().min(HEADER_BYTES);
        header[..end].copy_from_slice(&text.as_bytes()[..end]);
        PackedFile { path: cache.folder.join(format!("{name}.{precision}-{LAYOUT}")), header, length }
    }

    /// Maps the file, after making it if need be.
    fn obtain(self, pack_all: &dyn Fn() -> MappedFile) -> io::Result<(MappedFile, PathBuf)> {
        if let Some(file) = self.map() {
            return Ok((file, self.path));
        }
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        let new = self.path.with_added_extension("new");
        let mut file = File::options().create(true).truncate(false).write(true).open(&new)?;
        // Whoever else is making it ends first. Locks end with their process, also when it is killed.
        file.lock()?;
        let made_meanwhile = self.map();
        let done = match made_meanwhile {
            Some(_) => fs::remove_file(&new),
            None => self.write(&mut file, &pack_all()).and_then(|()| fs::rename(&new, &self.path)),
        };
        match (made_meanwhile, done) {
            (Some(file), _) => Ok((file, self.path)),
            (None, Ok(())) => match self.map() {
                Some(file) => Ok((file, self.path)),
                None => Err(io::Error::other("what was written cannot be read again")),
            },
            (None, Err(error)) => {
                // It may be gone already, and if not, the next one writes over it.
                let _ = fs::remove_file(&new);
                Err(error)
            }
        }
    }

    /// The file, if it is there and is this one.
    fn map(&self) -> Option<MappedFile> {
        let file = MappedFile::open_and_read(&self.path).ok()?;
        (file.bytes().len() == self.length && file.bytes().starts_with(&self.header)).then_some(file)
    }

    fn write(&self, file: &mut File, packed: &MappedFile) -> io::Result<()> {
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(&self.header)?;
        file.write_all(&packed.bytes()[HEADER_BYTES..])?;
        file.sync_all()
    }
}
