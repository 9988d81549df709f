//! Packed weights, in memory that replicas of one model share.
//!
//! Packing takes the time to read and write all weights and comes to as much memory again, for every process. So the
//! result is kept as a file beside the model cache, named by the digest of the model and the version of the layout, and
//! mapped: the second replica finds it in the page cache and starts at once. Replicas that start together wait for the
//! first of them. The file is written under another name, flushed, and renamed: what has its name is whole.
//!
//! It is a cache. If it cannot be written the weights are private memory, and the engine works all the same.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::matrix::Matrix;
use super::panels::{PANEL, Panels, Unpacked, pack};
use crate::model::MappedFile;

/// To be raised with every change of what a packed file holds.
const LAYOUT: &str = "f32-panel32-v1";

/// The file's first page says what it is; numbers begin on the second.
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
    storage: Storage,
    layers: Vec<(usize, Range<usize>)>,
}

enum Storage {
    Mapped(MappedFile),
    Own(Matrix),
}

impl Packed {
    /// Packs the layers, or finds them packed.
    pub(super) fn obtain(layers: &[Unpacked], cache: Option<&PackedCache>) -> (Packed, WeightsPlace) {
        let mut total = 0;
        let place_of = |layer: &Unpacked| {
            let start = total;
            total += layer.packed_size();
            (layer.inputs, start..total)
        };
        let places: Vec<(usize, Range<usize>)> = layers.iter().map(place_of).collect();
        let pack_all = || {
            let mut packed = Matrix::default();
            packed.resize(1, total);
            for (layer, (_, place)) in layers.iter().zip(&places) {
                pack(layer, &mut packed.data_mut()[place.clone()]);
            }
            packed
        };
        let (storage, place) = match cache.map(|cache| PackedFile::new(cache, total).obtain(&pack_all)) {
            Some(Ok((file, path))) => (Storage::Mapped(file), WeightsPlace::SharedFile(path)),
            Some(Err(error)) => {
                let problem = Some(error.to_string());
                (Storage::Own(pack_all()), WeightsPlace::OwnMemory { problem })
            }
            None => (Storage::Own(pack_all()), WeightsPlace::OwnMemory { problem: None }),
        };
        let layers = places;
        (Packed { storage, layers }, place)
    }

    /// The layer of this index.
    pub(super) fn layer(&self, index: usize) -> Panels<'_> {
        let (inputs, place) = &self.layers[index];
        let numbers = match &self.storage {
            Storage::Mapped(file) => file.floats(HEADER_BYTES).expect("a mapped file begins on a page"),
            Storage::Own(matrix) => matrix.data(),
        };
        Panels::new(*inputs, &numbers[place.clone()])
    }
}

/// A file of packed weights, made or not.
struct PackedFile {
    path: PathBuf,
    header: [u8; HEADER_BYTES],
    numbers: usize,
}

impl PackedFile {
    fn new(cache: &PackedCache, numbers: usize) -> PackedFile {
        // A digest is a file name; whatever else was given, the header has it in full.
        let name: String =
            cache.digest.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let bytes = if cfg!(target_endian = "little") { "little" } else { "big" };
        let text = format!(
            "meridian packed weights\nlayout {LAYOUT}\nbytes {bytes} end first\nnumbers {numbers}\nmodel {}\n",
            cache.digest
        );
        let mut header = [0; HEADER_BYTES];
        let length = text.len().min(HEADER_BYTES);
        header[..length].copy_from_slice(&text.as_bytes()[..length]);
        PackedFile { path: cache.folder.join(format!("{name}.{LAYOUT}")), header, numbers }
    }

    /// Maps the file, after making it if need be.
    fn obtain(self, pack_all: &dyn Fn() -> Matrix) -> io::Result<(MappedFile, PathBuf)> {
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
            None => self.write(&mut file, pack_all()).and_then(|()| fs::rename(&new, &self.path)),
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
        let length = HEADER_BYTES + self.numbers * size_of::<f32>();
        let file = MappedFile::open_and_read(&self.path).ok()?;
        (file.bytes().len() == length && file.bytes().starts_with(&self.header)).then_some(file)
    }

    fn write(&self, file: &mut File, packed: Matrix) -> io::Result<()> {
        file.set_len(0)?;
        file.rewind()?;
        let mut writer = BufWriter::with_capacity(1 << 16, &mut *file);
        writer.write_all(&self.header)?;
        for line in packed.data().as_chunks::<PANEL>().0 {
            writer.write_all(line.map(f32::to_ne_bytes).as_flattened())?;
        }
        writer.flush()?;
        drop(writer);
        file.sync_all()
    }
}
