//! Parsing of the files of one apply. All problems are reported together, each with its file and line.
//!
//! The files are parsed as one document, in order, because together they describe one state: a name that occurs in two
//! files is a duplicate.

use std::collections::BTreeMap;

use crate::placement::{RegisteredAccelerators, parse_deployments};
use regions::{Catalogue, Deployment, DeploymentName, Problem, TenantId, TenantRules, parse_tenants};

use scheduler_api::apply::{ApplyFileV1, ProblemV1};

/// Maximum number of files of one apply: one for each team of a large organization.
pub const FILES_MAX: usize = 256;

/// Parses the complete set of deployments from these files, which replaces `before`. A new or changed placement that no regions of
/// the catalogue can meet is a problem; `registered` are the accelerators that spokes have registered.
pub fn deployments(
    files: &[ApplyFileV1],
    catalogue: &Catalogue,
    registered: &RegisteredAccelerators,
    before: &BTreeMap<DeploymentName, Deployment>,
) -> Result<Vec<Deployment>, Vec<ProblemV1>> {
    read(files, |text| parse_deployments(text, catalogue, registered, before))
}

/// Parses the complete set of tenants from these files.
pub fn tenants(
    files: &[ApplyFileV1],
    catalogue: &Catalogue,
) -> Result<BTreeMap<TenantId, TenantRules>, Vec<ProblemV1>> {
    read(files, |text| parse_tenants(text, catalogue))
}

/// Returns the file and the line with the name of a deployment that was read from these files, for a problem that only the
/// hub can know. Without such a line, as in an inline table, it is the first line of the first file.
pub fn place(files: &[ApplyFileV1], name: &DeploymentName) -> (String, usize) {
    let is_name = |line: &str| {
        let value = line.trim().strip_prefix("name").and_then(|rest| rest.trim_start().strip_prefix('='));
        let value = value.map(|value| value.split('#').next().unwrap_or_default().trim());
        value.is_some_and(|value| value.trim_matches(['"', '\'']) == name.as_str())
    };
    let found = files.iter().find_map(|file| {
        let line = file.text.lines().position(is_name)?;
        Some((file.name.clone(), line + 1))
    });
    found.unwrap_or_else(|| (files.first().map(|file| file.name.clone()).unwrap_or_default(), 1))
}

fn read<T>(
    files: &[ApplyFileV1],
    parse: impl FnOnce(&str) -> Result<T, Vec<Problem>>,
) -> Result<T, Vec<ProblemV1>> {
    if let Some(one_too_many) = files.get(FILES_MAX) {
        let message =
            format!("{} files: at most {FILES_MAX} can be applied at once; merge some", files.len());
        return Err(vec![ProblemV1 { file: one_too_many.name.clone(), line: 1, message }]);
    }
    let (mut text, mut starts) = (String::new(), Vec::new());
    let mut lines = 0;
    for file in files {
        starts.push((lines, file.name.as_str()));
        text.push_str(&file.text);
        if !file.text.ends_with('\n') {
            text.push('\n');
        }
        lines += file.text.lines().count().max(1);
    }
    parse(&text).map_err(|problems| problems.into_iter().map(|problem| in_file(problem, &starts)).collect())
}

/// Maps a problem of the joined document to its file.
fn in_file(Problem { line, message, .. }: Problem, starts: &[(usize, &str)]) -> ProblemV1 {
    let file = starts.iter().rev().find(|(before, _)| *before < line);
    let (before, name) = file.copied().unwrap_or_default();
    ProblemV1 { file: name.to_owned(), line: line - before, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: &str = "[[deployment]]\nname = \"a\"\ntask = \"embed\"\nmodel = \"pypi://m\"\nengine = { kind = \"cpu\", precision = \"f32\" }";

    fn read(files: &[(&str, &str)]) -> Result<Vec<String>, Vec<(String, usize, String)>> {
        let file = |(name, text): &(&str, &str)| ApplyFileV1 { name: (*name).into(), text: (*text).into() };
        let files: Vec<_> = files.iter().map(file).collect();
        deployments(&files, &Catalogue::builtin(), &RegisteredAccelerators::new(), &BTreeMap::new())
            .map(|found| found.iter().map(|deployment| deployment.name.to_string()).collect())
            .map_err(|found| {
                found.into_iter().map(|ProblemV1 { file, line, message }| (file, line, message)).collect()
            })
    }

    #[test]
    fn files_are_parsed_as_one_and_each_problem_has_its_file_and_line() {
        let other = SOUND.replace("\"a\"", "\"b\"");
        assert_eq!(read(&[("one", SOUND), ("two", &other)]), Ok(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(read(&[("none", "deployment = []")]), Ok(Vec::new()));

        let wrong = format!("# empty\n\n{}", SOUND.replace("\"embed\"", "\"embde\""));
        let problems = read(&[("one", SOUND), ("empty", ""), ("two", &wrong)]).unwrap_err();
        let places: Vec<_> = problems.iter().map(|(file, line, _)| (file.as_str(), *line)).collect();
        assert_eq!(places, [("two", 4), ("two", 5)], "{problems:?}");
        assert!(problems[0].2.contains("named `a` too") && problems[1].2.contains("did you mean embed"));
    }

    #[test]
    fn the_place_of_a_deployment_is_the_line_with_its_name() {
        let file = |name: &str, text: &str| ApplyFileV1 { name: name.into(), text: text.into() };
        let files = [file("one", SOUND), file("two", "# name = \"b\"\n[[deployment]]\nname = 'b' # ours\n")];
        let place = |name: &str| place(&files, &name.parse().unwrap());
        assert_eq!(place("a"), ("one".to_owned(), 2));
        assert_eq!(place("b"), ("two".to_owned(), 3));
        assert_eq!(place("c"), ("one".to_owned(), 1), "it is not written on a line of its own");
    }

    #[test]
    fn the_maximum_number_of_files_is_accepted_and_one_more_is_not() {
        let files = |count: usize| vec![("empty", "# empty"); count];
        assert_eq!(read(&files(FILES_MAX)), Ok(Vec::new()));
        let problems = read(&files(FILES_MAX + 1)).unwrap_err();
        assert!(problems[0].2.contains("257 files"), "{problems:?}");
    }
}
