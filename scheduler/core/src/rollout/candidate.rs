//! The files that an operator wants to be so, read as one: everything that is wrong with them at once, each with its file
//! and its line.
//!
//! Several files are read as one document, the one after the other, because what they say is one thing: a name that stands
//! in two of them stands twice.

use std::collections::BTreeMap;

use regions::{Catalogue, Deployment, Problem, TenantId, TenantRules, parse_deployments, parse_tenants};

use crate::wire::apply::{FileV1, ProblemV1};

/// Files of one apply: one for each team of a large house.
pub const FILES_MAX: usize = 256;

/// The deployments of these files, which are all that there shall be.
pub fn deployments(files: &[FileV1], catalogue: &Catalogue) -> Result<Vec<Deployment>, Vec<ProblemV1>> {
    read(files, |text| parse_deployments(text, catalogue))
}

/// The tenants of these files, likewise.
pub fn tenants(
    files: &[FileV1],
    catalogue: &Catalogue,
) -> Result<BTreeMap<TenantId, TenantRules>, Vec<ProblemV1>> {
    read(files, |text| parse_tenants(text, catalogue))
}

fn read<T>(
    files: &[FileV1],
    parse: impl FnOnce(&str) -> Result<T, Vec<Problem>>,
) -> Result<T, Vec<ProblemV1>> {
    if let Some(one_too_many) = files.get(FILES_MAX) {
        let message = format!("{} files: at most {FILES_MAX} are read at once; join some", files.len());
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
    parse(&text).map_err(|problems| problems.into_iter().map(|problem| placed(problem, &starts)).collect())
}

/// A problem of the whole as one of its file.
fn placed(Problem { line, message }: Problem, starts: &[(usize, &str)]) -> ProblemV1 {
    let file = starts.iter().rev().find(|(before, _)| *before < line);
    let (before, name) = file.copied().unwrap_or_default();
    ProblemV1 { file: name.to_owned(), line: line - before, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: &str = "[[deployment]]\nname = \"a\"\ntask = \"embed\"\nmodel = \"pypi://m\"\nengine = { kind = \"cpu\", precision = \"f32\" }";

    fn read(files: &[(&str, &str)]) -> Result<Vec<String>, Vec<(String, usize, String)>> {
        let file = |(name, text): &(&str, &str)| FileV1 { name: (*name).into(), text: (*text).into() };
        let files: Vec<_> = files.iter().map(file).collect();
        deployments(&files, &Catalogue::builtin())
            .map(|found| found.iter().map(|deployment| deployment.name.to_string()).collect())
            .map_err(|found| {
                found.into_iter().map(|ProblemV1 { file, line, message }| (file, line, message)).collect()
            })
    }

    #[test]
    fn several_files_are_one_and_each_problem_has_its_own_file_and_line() {
        let other = SOUND.replace("\"a\"", "\"b\"");
        assert_eq!(read(&[("one", SOUND), ("two", &other)]), Ok(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(read(&[("none", "deployment = []")]), Ok(Vec::new()));

        let wrong = format!("# nothing\n\n{}", SOUND.replace("\"embed\"", "\"embde\""));
        let problems = read(&[("one", SOUND), ("empty", ""), ("two", &wrong)]).unwrap_err();
        let told: Vec<_> = problems.iter().map(|(file, line, _)| (file.as_str(), *line)).collect();
        assert_eq!(told, [("two", 4), ("two", 5)], "{problems:?}");
        assert!(problems[0].2.contains("named `a` too") && problems[1].2.contains("did you mean embed"));
    }

    #[test]
    fn as_many_files_as_there_may_be_are_read_and_one_more_is_not() {
        let files = |count: usize| vec![("empty", "# nothing"); count];
        assert_eq!(read(&files(FILES_MAX)), Ok(Vec::new()));
        let problems = read(&files(FILES_MAX + 1)).unwrap_err();
        assert!(problems[0].2.contains("257 files"), "{problems:?}");
    }
}
