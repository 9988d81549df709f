//! File access of the receipts audit: finds the files of receipts and reads them in order.

use super::file::{Name, list};
use gateway_core::receipt::audit::{Audit, AuditOptions, Report};
use regions::catalogue::Catalogue;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Returns the files of receipts in these directories, in order of chain and number.
///
/// # Errors
///
/// Returns the directory that cannot be read, and why.
pub fn files_in(dirs: &[PathBuf]) -> Result<Vec<PathBuf>, (PathBuf, io::Error)> {
    let mut found: Vec<(Name, &Path)> = Vec::new();
    for dir in dirs {
        let names = list(dir).map_err(|error| (dir.clone(), error))?;
        found.extend(names.into_iter().map(|name| (name, dir.as_path())));
    }
    found.sort();
    Ok(found.into_iter().map(|(name, dir)| name.in_dir(dir)).collect())
}

/// Audits these files, one in memory at a time; calls `read` after each.
///
/// # Errors
///
/// Returns the file that cannot be read, and why.
pub fn audit(
    files: &[PathBuf],
    catalogue: &Catalogue,
    demands: AuditOptions,
    mut read: impl FnMut(),
) -> Result<Report, (PathBuf, io::Error)> {
    let mut audit = Audit::new(catalogue, demands);
    for file in files {
        let content = fs::read(file).map_err(|error| (file.clone(), error))?;
        audit.file(&file.display().to_string(), &content);
        read();
    }
    Ok(audit.finish())
}
